"""Launchers, one module each; `choose_backend` picks one for the hosts that the user names."""

import os
from pathlib import Path

from farandole.errors import ConfigError
from farandole.launch.backend import Backend
from farandole.launch.backends.local import LocalBackend
from farandole.launch.backends.slurm import Srun, allocated_hosts
from farandole.launch.backends.ssh import Ssh, SshBackend
from farandole.launch.hosts import fill_slots, is_local, parse_hosts, read_hostfile

__all__ = ["choose_backend"]


def choose_backend(
    hosts: str | None,
    hostfile: str | os.PathLike[str] | None,
    num_proc: int,
    ssh: Ssh,
    interface: str | None = None,
) -> Backend:
    """Return the backend that reaches the named hosts. None named: the nodes of the Slurm allocation in which this
    process is, else this machine with a slot for each rank.

    `interface` is the one by which ranks connect. Raises `SlotsError` when `num_proc` ranks do not fit."""
    if hosts is not None and hostfile is not None:
        raise ConfigError("hosts", "give hosts or a hostfile, not both")
    if hosts is None and hostfile is None:
        nodes = allocated_hosts(os.environ)
        if all(is_local(node.name) for node in nodes):
            return LocalBackend(num_proc)
        fill_slots(nodes, num_proc)
        return SshBackend(nodes, Srun(), interface=interface)
    named = read_hostfile(Path(hostfile)) if hostfile is not None else parse_hosts(hosts or "")
    used = fill_slots(named, num_proc)
    if all(is_local(host.name) for host in dict.fromkeys(used)):
        return LocalBackend(num_proc)
    return SshBackend(named, ssh, interface=interface)
