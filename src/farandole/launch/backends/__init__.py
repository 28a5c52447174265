"""Launchers, one module each; `choose_backend` selects one for the hosts that the user names."""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from farandole.errors import ConfigError
from farandole.launch.backend import Backend, Host
from farandole.launch.backends.local import LocalBackend
from farandole.launch.backends.lsf import refuse_unnamed_hosts
from farandole.launch.backends.mpi_operator import OperatorJob
from farandole.launch.backends.slurm import Srun, allocated_hosts
from farandole.launch.backends.ssh import Shell, Ssh, SshBackend
from farandole.launch.hosts import fill_slots, is_local, parse_hosts, read_hostfile

__all__ = ["choose_backend", "reach_pods"]


def choose_backend(
    hosts: str | None,
    hostfile: str | os.PathLike[str] | None,
    num_proc: int | None,
    ssh: Ssh,
    interface: str | None = None,
    start_timeout: timedelta = timedelta(seconds=120),
) -> Backend:
    """Return the backend that reaches the named hosts. Without names these are the pods of the MPI operator's job whose
    launcher is this process, else the nodes of the Slurm allocation, else this machine with a slot for each rank.

    `interface` is the network interface of the ranks. In an operator's job `num_proc` may be None, for a rank in each
    slot, and the call blocks up to `start_timeout` until the pods have addresses. Raises `SlotsError` if the ranks do
    not fit, and `HostsError` for pods without an address."""
    if hosts is not None and hostfile is not None:
        raise ConfigError("hosts", "give hosts or a hostfile, not both")
    job = OperatorJob.find() if hosts is None else None
    if job is not None and (hostfile is None or Path(hostfile) == job.hostfile):
        pods = job.wait_for_hosts(num_proc, start_timeout)
        return reach_pods(job, pods, num_proc or sum(pod.slots for pod in pods), ssh, start_timeout, interface)
    if num_proc is None:
        raise ConfigError("num_proc", "name the number of ranks: -np N")
    if hosts is None and hostfile is None:
        refuse_unnamed_hosts(os.environ)
        nodes = allocated_hosts(os.environ)
        if all(is_local(node.name) for node in nodes):
            return LocalBackend(num_proc)
        return _reaching(nodes, num_proc, Srun(), interface)
    named = read_hostfile(Path(hostfile)) if hostfile is not None else parse_hosts(hosts or "")
    return _reaching(named, num_proc, ssh, interface)


def reach_pods(
    job: OperatorJob, pods: Sequence[Host], num_proc: int, ssh: Ssh, start_timeout: timedelta, interface: str | None
) -> Backend:
    """Return the backend for `num_proc` ranks in the slots of the job's `pods`."""
    return _reaching(pods, num_proc, job.shell(ssh, start_timeout), interface)


def _reaching(hosts: Sequence[Host], num_proc: int, ssh: Shell, interface: str | None) -> Backend:
    """Return the backend for `num_proc` ranks in the slots of `hosts`: local if all ranks are here, else over `ssh`."""
    used = fill_slots(hosts, num_proc)
    if all(is_local(host.name) for host in dict.fromkeys(used)):
        return LocalBackend(num_proc)
    return SshBackend(hosts, ssh, interface=interface)
