"""Start of ranks by the mpirun of the site, for `--mpi`: its command line, as Horovod wrote it.

This process becomes mpirun, which starts the ranks, forwards their output and its signals, and gives the exit code. The
ranks meet by MPI, see `farandole.bootstrap`."""

import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

from farandole.errors import ConfigError
from farandole.launch.backend import Binding, Host
from farandole.launch.backends.mpi_operator import OperatorJob, prte_variables
from farandole.launch.backends.ssh import Ssh
from farandole.launch.hosts import fill_slots, parse_hosts, read_hostfile
from farandole.launch.options import Given
from farandole.topology import interface_names

__all__ = ["Asked", "Launcher", "become_mpirun", "command_of", "hosts_for_mpirun", "prepare"]

log = logging.getLogger(__name__)

PROGRAMS = ("mpirun", "mpiexec", "mpiexec.hydra")
STAND_IN = "mpirun (farandole"  # how `farandole.compat.mpirun --version` begins
SECONDS = 30  # for a launcher to print its version
MANY_HOSTS = 64  # from here on Open MPI connects to each host itself, as Horovod asked of it
# Variables by which mpirun finds the hosts of its batch system.
_BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")
# Variables of one host, one shell, one launcher, and secrets of another job.
_OWN = re.compile(
    r"HOSTNAME|PWD|OLDPWD|SHLVL|_|SSH_.*|DISPLAY|TERM|K_MPI_JOB_ROLE|HOROVOD_SECRET_KEY|FARANDOLE_SECRET"
    r"|(OMPI|PMIX|PRTE|PMI|HYDRA|I_MPI|SLURM|PBS|LSB)_.*"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # a shell's exported functions have other names

Flavour = Literal["Open MPI", "MPICH", "Intel MPI"]


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher of MPI: its file, the name by which it was found, what it is, and its major version (0: unknown)."""

    path: str
    name: str
    flavour: Flavour
    version: int

    @classmethod
    def find(cls, env: Mapping[str, str]) -> "Launcher":
        """Return the first launcher on the PATH of `env`, which prints its version; raises `ConfigError`."""
        path = env.get("PATH", os.defpath)
        name = next((each for each in PROGRAMS if shutil.which(each, path=path) is not None), None)
        if name is None:
            raise ConfigError(
                "mpi",
                f"no mpirun is in a directory of PATH ({path}). Install Open MPI, MPICH or Intel MPI, or leave --mpi "
                "out: then farandole starts the ranks itself",
            )
        file = shutil.which(name, path=path) or name
        said = _version_of(file, env)
        if STAND_IN in said:
            raise ConfigError("mpi", f"{file} is farandole's stand-in for mpirun, without MPI; leave --mpi out")
        if "Open MPI" in said or "OpenRTE" in said:
            flavour: Flavour = "Open MPI"
        elif "Intel(R) MPI" in said:
            flavour = "Intel MPI"
        elif "HYDRA" in said or "MPICH" in said:
            flavour = "MPICH"
        else:
            raise ConfigError(
                "mpi",
                f"{file} --version says {(said.strip().splitlines() or [''])[0]!r}, which is neither Open MPI, MPICH "
                "nor Intel MPI; start the program by that command yourself",
            )
        number = re.search(r"\b([0-9]+)\.[0-9]", said)
        return cls(file, name, flavour, int(number[1]) if number else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The ranks that mpirun is to start, and the options for it."""

    ranks: int
    hosts: Sequence[Host] = ()  # none: those that mpirun finds
    mpi_args: str = ""
    binding_args: str | None = None
    binding: Binding = "none"
    tcp: bool = False
    interfaces: Sequence[str] = ()
    ssh: Ssh = field(default_factory=Ssh)
    output: str | None = None  # a folder
    timestamp: bool = False

    @classmethod
    def of(cls, given: Given, hosts: str | None, interface: str | None, env: Mapping[str, str]) -> "Asked":
        """Return what `given` says, whose hosts are `hosts` or in its file; raises what `hosts_for_mpirun` raises."""
        assert given.num_proc is not None
        return cls(
            ranks=given.num_proc,
            hosts=hosts_for_mpirun(given.num_proc, hosts, given.hostfile, env),
            mpi_args=given.mpi_args or "",
            binding_args=given.binding_args,
            binding=given.binding,
            tcp=given.tcp,
            interfaces=() if interface is None else interface_names(interface),
            ssh=Ssh(command=given.ssh_command, port=given.ssh_port, identity_file=given.ssh_identity_file),
            output=given.output_filename,
            timestamp=given.timestamp,
        )


def hosts_for_mpirun(
    ranks: int, hosts: str | None, hostfile: str | os.PathLike[str] | None, env: Mapping[str, str]
) -> Sequence[Host]:
    """Return the hosts of `ranks`, named or in a file. Without either: this machine, or none where mpirun finds them.

    It finds those of a batch system or of the operator's job. Raises `SlotsError` for hosts with too few slots, and
    `ConfigError` for those that cannot be read."""
    found: Sequence[Host] = ()
    if hostfile is not None:
        found = read_hostfile(Path(hostfile))
    elif hosts is not None:
        found = parse_hosts(hosts)
    elif OperatorJob.find(env) is None and not any(env.get(name) for name in _BATCH):
        found = (Host("localhost", ranks),)
    if found:
        fill_slots(found, ranks)
    return found


def become_mpirun(asked: Asked, words: Sequence[str], environment: Mapping[str, str], fabric: str) -> NoReturn:
    """Replace this process by mpirun, which runs `words` as ranks with `environment`, in which `fabric` is set.

    Raises `ConfigError` when there is no launcher, or it cannot do what is asked."""
    launcher, command, env = prepare(asked, words, environment, fabric)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        # By its name: Open MPI takes its absolute path for the wish that other hosts have it in the same place.
        os.execve(launcher.path, command, env)
    except OSError as error:
        raise ConfigError("mpi", f"cannot run {launcher.path}: {error.strerror}") from error


def prepare(
    asked: Asked, words: Sequence[str], environment: Mapping[str, str], fabric: str
) -> tuple[Launcher, list[str], dict[str, str]]:
    """Return the launcher on the PATH of `environment`, the command that runs `words` as ranks, and its environment.

    Raises `ConfigError` when there is no launcher, or it cannot do what is asked."""
    launcher = Launcher.find(environment)
    # Python's output stays buffered, unlike below our own launcher: Open MPI puts its tag before every piece of a line.
    env = dict(environment)
    if asked.tcp and fabric == "auto":
        env["FARANDOLE_FABRIC"] = "tcp"
    if asked.interfaces:
        env.setdefault("NCCL_SOCKET_IFNAME", ",".join(asked.interfaces))
    command, added = command_of(launcher, asked, words, env)
    if asked.output is not None:
        Path(asked.output).mkdir(parents=True, exist_ok=True)
    log.info("%s", shlex.join(command))
    return launcher, command, {**env, **prte_variables(env), **added}


def command_of(
    launcher: Launcher, asked: Asked, words: Sequence[str], env: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the launcher's command line for `words`, and the variables that say what it has no option for.

    Raises `ConfigError` when this launcher cannot do what is asked."""
    if launcher.flavour == "Open MPI":
        return [launcher.name, *_open_mpi(launcher.version, asked, env), *words], {}
    options, added = _hydra(launcher.flavour, asked)
    return [launcher.name, *options, *words], added


def _open_mpi(version: int, asked: Asked, env: Mapping[str, str]) -> Iterator[str]:
    yield "--allow-run-as-root"
    yield from _open_mpi_output(version, asked)
    yield from ("-np", str(asked.ranks))
    if asked.hosts:
        yield from ("-H", ",".join(f"{host.name}:{host.slots}" for host in asked.hosts))
    if asked.binding_args is not None:
        yield from shlex.split(asked.binding_args)
    else:
        yield from ("--bind-to", "core" if asked.binding == "cores" else "none", "--map-by", "slot")
    yield from shlex.split(asked.mpi_args)
    plm = "plm_ssh" if version >= 5 else "plm_rsh"
    if asked.ssh.command != "ssh":
        yield from ("--mca", f"{plm}_agent", asked.ssh.command)
    if arguments := _ssh_arguments(asked.ssh):
        yield from ("--mca", f"{plm}_args", shlex.join(arguments))
    if len(asked.hosts) >= MANY_HOSTS:
        yield from ("--mca", f"{plm}_no_tree_spawn", "true")
        yield from ("--mca", f"{plm}_num_concurrent", str(len(asked.hosts)))
    if asked.tcp:
        # Shared memory within a host stays, by whatever name this version has it.
        yield from ("--mca", "pml", "ob1", "--mca", "btl", "^openib,ofi,uct,usnic", "--mca", "coll", "^hcoll,ucc")
    if asked.interfaces:
        yield from ("--mca", "btl_tcp_if_include", ",".join(asked.interfaces))
    for name in _exported(env):
        yield from ("-x", name)


def _open_mpi_output(version: int, asked: Asked) -> Iterator[str]:
    if version >= 5:
        wishes = ["tag", *(["timestamp"] if asked.timestamp else [])]
        yield from ("--output", ",".join([*wishes, *([f"dir={asked.output}"] if asked.output else [])]))
        return
    yield "--tag-output"
    if asked.timestamp:
        yield "--timestamp-output"
    if asked.output is not None:
        yield from ("--output-filename", asked.output)


def _hydra(flavour: Flavour, asked: Asked) -> tuple[list[str], dict[str, str]]:
    """Return the options of MPICH's launcher, or of Intel's, which has grown out of it, and variables."""
    intel = flavour == "Intel MPI"
    options = ["-l" if intel else "-prepend-rank", "-genvall"]
    added: dict[str, str] = {}
    if asked.timestamp and not intel:
        raise ConfigError("prefix_output_with_timestamp", "mpiexec of MPICH has no time before a line; leave it out")
    options += ["-prepend-timestamp"] if asked.timestamp else []
    options += ["-np", str(asked.ranks)]
    if asked.hosts and intel:
        if len({host.slots for host in asked.hosts}) > 1:
            raise ConfigError(
                "hosts", "mpirun of Intel MPI needs equally many slots on each host, or --mpi-args '-machinefile FILE'"
            )
        options += ["-ppn", str(asked.hosts[0].slots), "-hosts", ",".join(host.name for host in asked.hosts)]
    elif asked.hosts:
        options += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in asked.hosts)]
    if asked.binding_args is not None:
        options += shlex.split(asked.binding_args)
    elif asked.binding == "cores":
        options += ["-bind-to", "core"]
    options += shlex.split(asked.mpi_args)
    program, *more = shlex.split(asked.ssh.command)
    arguments = [*more, *_ssh_arguments(asked.ssh)]
    if arguments or program != "ssh":
        kind = "bootstrap" if intel else "launcher"
        options += [f"-{kind}", "ssh", f"-{kind}-exec", shutil.which(program) or program]
        name = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS" if intel else "HYDRA_LAUNCHER_EXTRA_ARGS"
        added[name] = " ".join(arguments)
    if asked.tcp:
        added |= {"FI_PROVIDER": "tcp", "UCX_TLS": "self,sm,tcp"}
    if asked.output is not None:
        for stream, option in (("stdout", "-outfile-pattern"), ("stderr", "-errfile-pattern")):
            options += [option, os.path.join(asked.output, f"rank.%r.{stream}")]
    return options, added


def _ssh_arguments(ssh: Ssh) -> list[str]:
    port = ["-p", str(ssh.port)] if ssh.port else []
    return [*port, *(["-i", ssh.identity_file] if ssh.identity_file else [])]


def _exported(env: Mapping[str, str]) -> list[str]:
    """Return the names of variables that ranks on other hosts get; their values stand in no argument list."""
    return sorted(name for name in env if _NAME.fullmatch(name) and not _OWN.fullmatch(name))


def _version_of(file: str, env: Mapping[str, str]) -> str:
    """Return what the launcher says of itself."""
    words = [file, "--version"]
    try:
        done = subprocess.run(words, env=dict(env), capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError("mpi", f"{file} --version cannot be run: {error}") from error
    return done.stdout + done.stderr
