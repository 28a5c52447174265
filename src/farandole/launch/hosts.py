"""Where ranks run: `-H host:slots,...`, host files, and which of the names is this machine."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farandole.errors import ConfigError, SlotsError

__all__ = ["Host", "check_hosts", "is_local", "parse_hosts", "read_hostfile"]


@dataclass(frozen=True, slots=True)
class Host:
    """A machine and how many ranks may run on it."""

    name: str
    slots: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read "host1:2,host2:4"; a host without a number has one slot."""
    return tuple(_host(each.strip(), *_split(each.strip()), setting="hosts") for each in text.split(","))


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a file of lines "host slots=2" (or "host:2"); # begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError("hostfile", f"cannot read {path}: {error.strerror}") from error
    hosts = []
    for line in lines:
        name, *words = line.partition("#")[0].split() or [""]
        if not name:
            continue
        slots = next((word.removeprefix("slots=") for word in words if word.startswith("slots=")), None)
        hosts.append(_host(line, name, slots, "hostfile") if slots else _host(line, *_split(name), setting="hostfile"))
    if not hosts:
        raise ConfigError("hostfile", f"{path} names no host")
    return tuple(hosts)


def check_hosts(hosts: str | None, hostfile: str | os.PathLike[str] | None, num_proc: int) -> None:
    """Check that `num_proc` ranks fit on the hosts named, and that those are this machine; nothing named is right.

    Raises `SlotsError` when they do not fit, `ConfigError` naming a host that ranks cannot be started on."""
    if hosts is not None and hostfile is not None:
        raise ConfigError("hosts", "give hosts or a hostfile, not both")
    if hosts is not None:
        _check(parse_hosts(hosts), num_proc)
    if hostfile is not None:
        _check(read_hostfile(Path(hostfile)), num_proc)


def _check(hosts: Sequence[Host], num_proc: int) -> None:
    for host in hosts:
        if not is_local(host.name):
            raise ConfigError(
                "hosts",
                f"{host.name!r} is not this machine, and ranks cannot be started on other machines yet; "
                "start them there with Spark or MPI, or use localhost",
            )
    available = sum(host.slots for host in hosts)
    if num_proc > available:
        raise SlotsError(num_proc, available, ", ".join(f"{host.name}:{host.slots}" for host in hosts))


def is_local(name: str) -> bool:
    """Is `name` this machine: by its names, or because one of its addresses can be bound here?"""
    if name in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(name.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError:
        return False  # a name that nobody knows is not ours
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def _split(entry: str) -> tuple[str, str]:
    name, colon, slots = entry.rpartition(":")
    return (name, slots) if colon else (entry, "1")


def _host(entry: str, name: str, slots: str, setting: str) -> Host:
    if not name or not slots.isascii() or not slots.isdigit() or int(slots) < 1:
        raise ConfigError(setting, f"{entry!r} is no host; write it as host:2, or as 'host slots=2' in a file")
    return Host(name, int(slots))
