"""Launchers, one module each; `choose_backend` selects one for the hosts that the user names.

A row of `SITES` makes a batch system or cluster known: its hosts take the ranks if the user names none."""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from farandole.errors import ConfigError
from farandole.launch.backend import Backend, Host, Shell, Site
from farandole.launch.backends.local import LocalBackend
from farandole.launch.backends.lsf import LsfJob
from farandole.launch.backends.mpi_operator import OperatorJob
from farandole.launch.backends.slurm import Allocation
from farandole.launch.backends.ssh import SshBackend
from farandole.launch.hosts import fill_slots, is_local, parse_hosts, read_hostfile
from farandole.topology import interface_addresses

__all__ = ["SITES", "choose_backend", "chosen_site", "find_site", "named_hosts", "reach", "variables_of_ranks"]

SITES: Sequence[type[Site]] = (OperatorJob, LsfJob, Allocation)


def find_site(env: Mapping[str, str] | None = None) -> Site | None:
    """Return the batch system or cluster that has given hosts to the process with `env` (default: `os.environ`)."""
    return next(filter(None, (site.find(env) for site in SITES)), None)


def variables_of_ranks(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables that describe only a launcher's own process."""
    site = find_site(env)
    return dict(env) if site is None else site.variables_of_ranks(env)


def choose_backend(
    hosts: str | None,
    hostfile: str | os.PathLike[str] | None,
    num_proc: int | None,
    ssh: Shell,
    interface: str | None = None,
    start_timeout: timedelta = timedelta(seconds=120),
) -> Backend:
    """Return the backend that reaches the named hosts. Without names these are the hosts of the site (the pods of the
    MPI operator's job whose launcher is this process, the nodes of the Slurm allocation), else this machine with a slot
    for each rank.

    `interface` is the network interface of the ranks. If the site counts its slots, `num_proc` may be None, for a rank
    in each, and the call blocks up to `start_timeout` until the pods have addresses. Raises `SlotsError` if the ranks
    do not fit, and `HostsError` for pods without an address."""
    found = named_hosts(hosts, hostfile, num_proc, start_timeout)
    site = chosen_site(hosts, hostfile)
    shell = ssh if site is None else site.shell(ssh, start_timeout)
    return reach(found, num_proc or sum(host.slots for host in found), shell, interface)


def chosen_site(hosts: str | None, hostfile: str | os.PathLike[str] | None) -> Site | None:
    """Return the site that provides the hosts; None if the user names others, or there is no site."""
    site = find_site() if hosts is None else None
    return None if site is None or (hostfile is not None and not site.owns(Path(hostfile))) else site


def named_hosts(
    hosts: str | None, hostfile: str | os.PathLike[str] | None, num_proc: int | None, start_timeout: timedelta
) -> Sequence[Host]:
    """Return the hosts of `choose_backend`; blocks and raises as it does."""
    if hosts is not None and hostfile is not None:
        raise ConfigError("hosts", "give hosts or a hostfile, not both")
    site = chosen_site(hosts, hostfile)
    if num_proc is None and (site is None or not site.counts_slots):
        raise ConfigError("num_proc", "name the number of ranks: -np N")
    if site is not None:
        return site.wait_for_hosts(num_proc, start_timeout)
    if hostfile is not None:
        return read_hostfile(Path(hostfile))
    if hosts is not None:
        return parse_hosts(hosts)
    assert num_proc is not None
    return (Host("localhost", num_proc),)


def reach(hosts: Sequence[Host], num_proc: int, shell: Shell, interface: str | None) -> Backend:
    """Return the backend for `num_proc` ranks in the slots of `hosts`: local if all are here, else over `shell`.

    Raises `ConfigError` if the ranks are here and this machine has no such interface."""
    used = fill_slots(hosts, num_proc)
    if all(is_local(host.name) for host in dict.fromkeys(used)):
        if interface is not None:
            interface_addresses(interface)
        return LocalBackend(num_proc)
    return SshBackend(hosts, shell, interface=interface)
