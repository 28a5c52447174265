"""Start of ranks by the mpirun of the site, for `--mpi`, with the command line that Horovod gives it.

This process becomes mpirun, which starts the ranks, forwards their output and its signals, and sets the exit code. The
ranks meet by MPI, see `farandole.meeting.launched`."""

import argparse
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

from farandole.config import Config
from farandole.errors import ConfigError
from farandole.launch.backend import Binding, Host
from farandole.launch.backends import find_site
from farandole.launch.backends.mpi_operator import prte_variables
from farandole.launch.backends.ssh import Ssh
from farandole.launch.environment import with_settings
from farandole.launch.hosts import fill_slots, parse_hosts, read_hostfile
from farandole.launch.options import Given, shell_words
from farandole.topology import OF_ONE_PROCESS, interface_names

log = logging.getLogger(__name__)

PROGRAMS = ("mpirun", "mpiexec", "mpiexec.hydra")
STAND_IN = "mpirun (farandole"  # how `farandole.compat.mpirun --version` begins
SECONDS = 30  # for a launcher to print its version
MANY_HOSTS = 64  # from this number on mpirun connects to each host itself, as with Horovod
# Variables by which mpirun finds the hosts of its batch system.
_BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")
# Variables that ranks on other hosts do not get: those of one host, shell or launcher, and secrets of another job.
_OWN = re.compile(
    r"HOSTNAME|PWD|OLDPWD|SHLVL|_|SSH_.*|DISPLAY|TERM|K_MPI_JOB_ROLE|HOROVOD_SECRET_KEY|FARANDOLE_SECRET"
    r"|(OMPI|PMIX|PRTE|PMI|HYDRA|I_MPI|SLURM|PBS|LSB)_.*"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # a shell's exported functions have other names

Flavour = Literal["Open MPI", "MPICH", "Intel MPI"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for ranks that the mpirun of the site starts, as a group."""
    mpi = parser.add_argument_group(
        "mpirun", "Open MPI, MPICH or Intel MPI start the ranks, with this command's variables"
    )
    who = mpi.add_mutually_exclusive_group()
    who.add_argument("--mpi", action="store_true", help="start the ranks by the mpirun on PATH")
    who.add_argument("--gloo", action="store_true", help="start the ranks without MPI (default)")
    mpi.add_argument("--mpi-args", type=shell_words, metavar="WORDS", help="further options of mpirun; implies --mpi")
    mpi.add_argument(
        "--binding-args",
        type=shell_words,
        metavar="WORDS",
        help="mpirun's options for binding and mapping; implies --mpi (default: none)",
    )
    mpi.add_argument("--tcp", action="store_true", help="MPI uses TCP between hosts, and no interconnect")


def is_asked(given: Given) -> bool:
    """Return whether mpirun starts the ranks. Options of the command line win over a file of options."""
    has_arguments = given.mpi_args is not None or given.binding_args is not None
    return given.mpi or (not given.gloo and (given.mpi_in_file or has_arguments))


def without_meaning(given: Given) -> list[str]:
    """Return a sentence for each given option of mpirun, for ranks that mpirun does not start."""
    options = {"--tcp": given.tcp, "--mpi-args": given.mpi_args, "--binding-args": given.binding_args}
    return [f"{flag} has no effect without --mpi" for flag, value in options.items() if value not in (None, False)]


def start(given: Given, hosts: str | None, settings: Config, environment: Mapping[str, str]) -> NoReturn:
    """Become mpirun with the options `given`, on `hosts` or those of a file; raises like `become_mpirun`."""
    asked = Asked.of(given, hosts, settings.interface, environment)
    become_mpirun(asked, given.command, with_settings(environment, settings, given.settings), settings.fabric)


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher of MPI: its file, the name by which it was found, what it is, and its major version (0: unknown)."""

    path: str
    name: str
    flavour: Flavour
    version: int

    @classmethod
    def find(cls, env: Mapping[str, str]) -> "Launcher":
        """Return the first launcher on the PATH of `env`, after a run of its --version; raises `ConfigError`."""
        path = env.get("PATH", os.defpath)
        name = next((each for each in PROGRAMS if shutil.which(each, path=path) is not None), None)
        if name is None:
            raise ConfigError(
                "mpi",
                f"no mpirun is in a directory of PATH ({path}). Install Open MPI, MPICH or Intel MPI, or leave --mpi "
                "out: then farandole starts the ranks itself",
            )
        file = shutil.which(name, path=path) or name
        about = _version_of(file, env)
        if STAND_IN in about:
            raise ConfigError("mpi", f"{file} is farandole's stand-in for mpirun, without MPI; leave --mpi out")
        if "Open MPI" in about or "OpenRTE" in about:
            flavour: Flavour = "Open MPI"
        elif "Intel(R) MPI" in about:
            flavour = "Intel MPI"
        elif "HYDRA" in about or "MPICH" in about:
            flavour = "MPICH"
        else:
            raise ConfigError(
                "mpi",
                f"{file} --version says {(about.strip().splitlines() or [''])[0]!r}, which is neither Open MPI, MPICH "
                "nor Intel MPI; start the program by that command yourself",
            )
        number = re.search(r"\b([0-9]+)\.[0-9]", about)
        return cls(file, name, flavour, int(number[1]) if number else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request to mpirun: the ranks to start, and its options."""

    ranks: int
    hosts: Sequence[Host] = ()  # none: mpirun finds them
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
        """Return the request of the options `given`, on `hosts` or those of a file; raises like `hosts_for_mpirun`."""
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
    """Return the hosts of `ranks`, from `hosts` or a file. Without either: this machine, or none if mpirun finds them.

    mpirun finds the hosts of a batch system and of the MPI operator's job. Raises `SlotsError` for hosts with too few
    slots, and `ConfigError` for hosts that cannot be read."""
    found: Sequence[Host] = ()
    if hostfile is not None:
        found = read_hostfile(Path(hostfile))
    elif hosts is not None:
        found = parse_hosts(hosts)
    elif find_site(env) is None and not any(env.get(name) for name in _BATCH):
        found = (Host("localhost", ranks),)
    if found:
        fill_slots(found, ranks)
    return found


def become_mpirun(asked: Asked, words: Sequence[str], environment: Mapping[str, str], fabric: str) -> NoReturn:
    """Replace this process by mpirun, which runs `words` as ranks with `environment`, in which `fabric` is set.

    Raises `ConfigError` if there is no launcher, or it does not support the request."""
    launcher, command, env = prepare(asked, words, environment, fabric)
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and mpirun's processes would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        # argv[0] is the bare name: given an absolute path, Open MPI looks for itself at this path on other hosts.
        os.execve(launcher.path, command, env)
    except OSError as error:
        raise ConfigError("mpi", f"cannot run {launcher.path}: {error.strerror}") from error


def prepare(
    asked: Asked, words: Sequence[str], environment: Mapping[str, str], fabric: str
) -> tuple[Launcher, list[str], dict[str, str]]:
    """Return the launcher on the PATH of `environment`, the command that runs `words` as ranks, and its environment.

    Raises `ConfigError` if there is no launcher, or it does not support the request."""
    launcher = Launcher.find(environment)
    # Unlike with farandole's launcher, Python's output stays buffered: Open MPI tags every piece of a line.
    env = {name: value for name, value in environment.items() if name not in OF_ONE_PROCESS}
    if asked.tcp and fabric == "auto":
        env["FARANDOLE_FABRIC"] = "tcp"
    if asked.interfaces:
        env.setdefault("NCCL_SOCKET_IFNAME", ",".join(asked.interfaces))
    command, added = command_of(launcher, asked, words, env)
    if asked.output is not None:
        try:
            Path(asked.output).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("output_filename", f"cannot write {error.filename}: {error.strerror}") from error
    log.info("%s", shlex.join(command))
    return launcher, command, {**env, **prte_variables(env), **added}


def command_of(
    launcher: Launcher, asked: Asked, words: Sequence[str], env: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the launcher's command line for `words`, and the variables for which it has no option.

    Raises `ConfigError` if this launcher does not support the request."""
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
        # Shared memory within a host stays: its name, which depends on the version, is not excluded.
        yield from ("--mca", "pml", "ob1", "--mca", "btl", "^openib,ofi,uct,usnic", "--mca", "coll", "^hcoll,ucc")
    if asked.interfaces:
        yield from ("--mca", "btl_tcp_if_include", ",".join(asked.interfaces))
    for name in _exported(env):
        yield from ("-x", name)


def _open_mpi_output(version: int, asked: Asked) -> Iterator[str]:
    if version >= 5:
        parts = ["tag", *(["timestamp"] if asked.timestamp else [])]
        yield from ("--output", ",".join([*parts, *([f"dir={asked.output}"] if asked.output else [])]))
        return
    yield "--tag-output"
    if asked.timestamp:
        yield "--timestamp-output"
    if asked.output is not None:
        yield from ("--output-filename", asked.output)


def _hydra(flavour: Flavour, asked: Asked) -> tuple[list[str], dict[str, str]]:
    """Return the options of MPICH's launcher, or of Intel's, which derives from it, and further variables."""
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
    """Return the names of the variables that ranks on other hosts get; no command line holds their values."""
    return sorted(name for name in env if _NAME.fullmatch(name) and not _OWN.fullmatch(name))


def _version_of(file: str, env: Mapping[str, str]) -> str:
    """Return the output of the launcher's --version; raises `ConfigError` if it does not run."""
    words = [file, "--version"]
    try:
        done = subprocess.run(words, env=dict(env), capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError("mpi", f"{file} --version cannot be run: {error}") from error
    return done.stdout + done.stderr
