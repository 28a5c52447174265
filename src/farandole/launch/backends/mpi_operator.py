"""Hosts of a job of Kubernetes' MPI operator, or of Kubeflow Trainer's MPI runtimes, read in the launcher's pod.

The controller writes two files into that pod, a host file and `discover_hosts.sh`, and some environment variables. The
kubelet rewrites the files while the pod runs."""

import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Self

from farandole.errors import ConfigError, HostsError
from farandole.launch.backend import Host, Shell, Site
from farandole.launch.backends.kubexec import Kubexec
from farandole.launch.backends.ssh import AT_ONCE, Ssh
from farandole.launch.hosts import fill_slots, read_hostfile
from farandole.launch.scripts import parse_script_hosts, run_script

log = logging.getLogger(__name__)

HOSTFILE = Path("/etc/mpi/hostfile")
DISCOVERY = "discover_hosts.sh"  # beside the host file; Kubeflow Trainer writes none
ROLE = "K_MPI_JOB_ROLE"  # "launcher" or "worker"; Kubeflow Trainer does not set it
IN_POD = "KUBERNETES_SERVICE_HOST"
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds between two checks of the hosts
REMIND = 30.0  # seconds between two warnings of the wait
LEAST_ATTEMPTS, MOST_ATTEMPTS = 10, 100  # attempts of ssh to connect, one per second

# Per MPI implementation: Open MPI, Intel MPI, MPICH.
_HOSTFILES = ("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE")
_SLOTS = ("OMPI_MCA_orte_set_default_slots", "I_MPI_PERHOST")
_KUBEXEC = "OMPI_MCA_plm_rsh_agent"  # set by Kubeflow's training operator, whose workers run no ssh server
_SSH_OPTIONS = ("OMPI_MCA_plm_rsh_args", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS", "HYDRA_LAUNCH_EXTRA_ARGS")
# Open MPI 5 does not read the names of Open MPI 4.
_PRTE = {
    "OMPI_MCA_orte_default_hostfile": "PRTE_MCA_prte_default_hostfile",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "PRTE_MCA_prte_keep_fqdn_hostnames",
    "OMPI_MCA_orte_set_default_slots": "PRTE_MCA_prte_set_default_slots",
    "OMPI_MCA_plm_rsh_args": "PRTE_MCA_plm_ssh_args",
}
# The controller gives these empty values in a launcher that is no worker.
_NO_GPU = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")


@dataclass(frozen=True, slots=True)
class OperatorJob(Site):
    """The job in whose launcher's pod this process runs."""

    hostfile: Path
    slots: int = 1  # of a host for which the files name no number
    ssh_options: str = ""  # the controller's, for the ssh of an mpirun
    kubexec: Path | None = None  # the controller's script in place of ssh

    counts_slots = True

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Self | None:
        """Return the job to whose launcher `env` belongs; None elsewhere."""
        role, named = env.get(ROLE, ""), next((env[name] for name in _HOSTFILES if env.get(name)), "")
        if role != "launcher" and (role or not named or IN_POD not in env):
            return None
        slots = next((env[name] for name in _SLOTS if env.get(name)), "1")
        if not slots.isascii() or not slots.isdigit() or int(slots) < 1:
            name = next(name for name in _SLOTS if env.get(name))
            raise ConfigError(name, f"must be a number of slots >= 1, got {slots!r}")
        options = next((env[name] for name in _SSH_OPTIONS if env.get(name)), "")
        agent = Path(env.get(_KUBEXEC, ""))
        kubexec = agent if agent.name == "kubexec.sh" else None
        return cls(Path(named) if named else HOSTFILE, int(slots), options, kubexec)

    def owns(self, file: Path) -> bool:
        """Return whether `file` is the controller's host file or discovery script."""
        return file in (self.hostfile, self.hostfile.with_name(DISCOVERY))

    def read_hosts(self) -> tuple[Host, ...]:
        """Return the hosts of the host file in its order. This pod, if it is one of them, is "localhost".

        Raises `ConfigError` if the file cannot be read: otherwise all ranks would run in this pod."""
        if not self.hostfile.is_file():
            raise ConfigError(
                "hostfile",
                f"this is the launcher's pod of an MPI job, but {self.hostfile} is missing; name hosts with -H "
                "(-H localhost:2 starts ranks in this pod)",
            )
        # A launcher that is a worker need not resolve its own name. Pods are compared without the cluster's domain.
        mine = _pod(socket.gethostname())
        hosts = read_hostfile(self.hostfile, self.slots)
        return tuple(replace(host, name="localhost") if _pod(host.name) == mine else host for host in hosts)

    def discover(self) -> tuple[Host, ...]:
        """Return the hosts whose pods run now, as `discover_hosts.sh` names them, in the order of the host file.

        The script orders hosts by name, so that worker 10 precedes worker 2. If its lines have no slots, those of the
        host file or of the environment count. Raises `ConfigError` if the script is missing or fails, or prints a line
        that names no host."""
        script = self.hostfile.with_name(DISCOVERY)
        lines = run_script(script)
        listed = {host.name: host.slots for host in read_hostfile(self.hostfile, self.slots)}
        running: dict[str, int] = {}
        for line in lines:
            for host in parse_script_hosts([line], listed.get(line.strip("[]"), self.slots)):
                running[host.name] = host.slots
        ordered = [*(name for name in listed if name in running), *(name for name in running if name not in listed)]
        return tuple(Host(name, running[name]) for name in ordered)

    def wait_for_hosts(self, num_proc: int | None, timeout: timedelta) -> tuple[Host, ...]:
        """Return the hosts once those that `num_proc` ranks (None: one per slot) fill have addresses, or pods that run.

        Reads the host file again at each check. Blocks up to `timeout`, then raises `HostsError` naming the hosts that
        are not ready; raises `SlotsError` at once if the ranks do not fit."""
        began, pause, reminded = time.monotonic(), FIRST_PAUSE, -REMIND
        awaited = "the addresses of" if self.kubexec is None else "the pods"
        while True:
            hosts = self.read_hosts()
            used = hosts if num_proc is None else fill_slots(hosts, num_proc)
            problems = self._problems(dict.fromkeys(host.name for host in used))
            if not problems:
                return hosts
            waited = time.monotonic() - began
            if waited >= timeout.total_seconds():
                raise HostsError({name: self._explain(name, why, waited) for name, why in problems.items()})
            if waited - reminded >= REMIND:
                limit = timeout.total_seconds()
                log.warning("waiting up to %.0f s for %s %s", limit - waited, awaited, ", ".join(problems))
                reminded = waited
            time.sleep(min(pause, max(0.0, timeout.total_seconds() - waited)))
            pause = min(2 * pause, LONGEST_PAUSE)

    def wait_for_workers(self, least: int, most: int, timeout: timedelta) -> tuple[Host, ...]:
        """Return `most` hosts once all hosts can be used; after `timeout` those that can, if there are `least`.

        Blocks up to `timeout`; raises `HostsError` naming the hosts that cannot be used if fewer than `least` can."""
        try:
            return self.wait_for_hosts(None, timeout)[:most]
        except HostsError as error:
            usable = tuple(host for host in self.read_hosts() if host.name not in error.reasons)
            if len(usable) < least:
                raise
            log.warning("starting with %d of %d workers: %s", len(usable), most, error)
            return usable[:most]

    def shell(self, ssh: Shell, start_timeout: timedelta) -> Shell:
        """Return the shell to a pod: `kubectl exec` if the controller provides it, else ssh.

        This ssh has the controller's options, the job's key, and more attempts for a pod that still starts."""
        if self.kubexec is not None:
            return Kubexec.read(self.kubexec)
        assert isinstance(ssh, Ssh), ssh
        attempts = max(LEAST_ATTEMPTS, min(MOST_ATTEMPTS, int(start_timeout.total_seconds())))
        command = f"{ssh.command} -o ConnectionAttempts={attempts} {self.ssh_options}".strip()
        return replace(ssh, command=command, identity_file=ssh.identity_file or key_of_job())

    def variables_of_ranks(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return `env` without the variables that describe only the launcher's pod."""
        kept = {name: value for name, value in env.items() if name != "HOSTNAME" and (value or name not in _NO_GPU)}
        return kept | {ROLE: "worker"}

    def _problems(self, names: Iterable[str]) -> dict[str, str]:
        """Return the hosts that cannot be used now, each with the reason."""
        if self.kubexec is None:
            return _unresolved(names)
        # The names of these pods have no addresses, and kubectl needs none.
        running = {host.name for host in self.discover()} | {"localhost"}
        return {name: "its pod does not run" for name in names if name not in running}

    def _explain(self, name: str, why: str, waited: float) -> str:
        if self.kubexec is not None:
            return f"{why} after {waited:.0f} s; raise start_timeout (FARANDOLE_START_TIMEOUT) if it needs more time"
        text = f"its name has no address after {waited:.0f} s ({why})"
        if self.hostfile.with_name(DISCOVERY).is_file() and name not in {host.name for host in self.discover()}:
            text += f"; the operator does not list its pod as running: kubectl describe pod {_pod(name)}"
        return f"{text}; raise start_timeout (FARANDOLE_START_TIMEOUT) if it needs more time"


def prte_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that give Open MPI 5 the settings that the controller has made in `env` for Open MPI 4.

    Variables that are set already keep their values."""
    found = {theirs: env[ours] for ours, theirs in _PRTE.items() if ours in env and theirs not in env}
    keep, file = _PRTE["OMPI_MCA_orte_keep_fqdn_hostnames"], Path(env.get("OMPI_MCA_orte_default_hostfile", ""))
    if keep in found and file.is_file():
        mine = _pod(socket.gethostname())
        if any(_pod(host.name) == mine for host in read_hostfile(file)):
            # Otherwise it takes this pod's own line for another host's, and connects to it over ssh.
            found[keep] = "false"
    return found


def key_of_job(mounts: Path = Path("/proc/self/mounts"), home: Path | None = None) -> str | None:
    """Return the job's private key if `sshAuthMountPath` is a folder in which ssh does not look for it, else None."""
    usual = (Path.home() if home is None else home) / ".ssh" / "id_rsa"
    if os.path.isfile(usual):
        return None
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        folder = line.split(" ")[1].replace("\\040", " ")
        # os.path.isfile is false, and raises nothing, in folders that this user may not enter.
        if all(os.path.isfile(os.path.join(folder, name)) for name in ("id_rsa", "authorized_keys")):
            return os.path.join(folder, "id_rsa")
    return None


def _unresolved(names: Iterable[str]) -> dict[str, str]:
    """Return the names without an address, each with the reason. Blocks as long as the resolver does."""
    each = list(names)
    with ThreadPoolExecutor(max(1, min(AT_ONCE, len(each)))) as pool:
        return {name: why for name, why in zip(each, pool.map(_lookup_problem, each), strict=True) if why}


def _lookup_problem(name: str) -> str:
    try:
        socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _pod(host: str) -> str:
    """Return the name of the pod whose host name is `host`."""
    return host.partition(".")[0]
