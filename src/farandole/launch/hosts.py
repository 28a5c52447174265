"""Hosts and their slots: `-H host:slots,...`, host files, and the names of this machine."""

import socket
from collections.abc import Sequence
from pathlib import Path

from farandole.errors import ConfigError, SlotsError
from farandole.launch.backend import Host


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read "host1:2,host2:4,[fd00::1]:2"; a host without a number has one slot."""
    return tuple(_host(each.strip(), *_split(each.strip(), "hosts"), "hosts") for each in text.split(","))


def read_hostfile(path: Path, slots: int = 1) -> tuple[Host, ...]:
    """Read a file of lines "host slots=2" (or "host:2"); # begins a comment. A host without a number has `slots`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError("hostfile", f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("hostfile", f"cannot read {path}: it is no text in UTF-8") from error
    hosts = []
    for line in lines:
        name, *words = line.partition("#")[0].split() or [""]
        if not name:
            continue
        number = next((word.removeprefix("slots=") for word in words if word.startswith("slots=")), None)
        hosts.append(_host(line, *((name, number) if number else _split(name, "hostfile", slots)), "hostfile"))
    if not hosts:
        raise ConfigError("hostfile", f"{path} names no host")
    return tuple(hosts)


def fill_slots(hosts: Sequence[Host], num_proc: int) -> list[Host]:
    """Return the host of each rank: ranks fill one host's slots after another's. Raises `SlotsError`."""
    filled = [host for host in hosts for _ in range(host.slots)]
    if num_proc > len(filled):
        raise SlotsError(num_proc, len(filled), ", ".join(f"{host.name}:{host.slots}" for host in hosts))
    return filled[:num_proc]


def is_local(name: str) -> bool:
    """Return whether `name` is a name of this machine, or of an address that can be bound here."""
    if name in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False  # an unknown name is not this machine's
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def route_to(address: str, port: int = 9) -> str:
    """Return this machine's address on the route to `address`; "" if there is no route. Sends nothing."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def _split(entry: str, setting: str, default: int = 1) -> tuple[str, str]:
    name, colon, slots = entry.rpartition(":")
    if not colon or slots.endswith("]"):
        return entry, str(default)
    if ":" in name and not name.endswith("]"):
        raise ConfigError(setting, f"{entry!r} is ambiguous; write the IPv6 address in brackets: [{name}]:{slots}")
    return name, slots


def _host(entry: str, name: str, slots: str, setting: str) -> Host:
    name = name.replace("[", "").replace("]", "")  # ssh takes no brackets
    if not name or not slots.isascii() or not slots.isdigit() or int(slots) < 1:
        raise ConfigError(setting, f"{entry!r} is no host; write it as host:2, or as 'host slots=2' in a file")
    return Host(name, int(slots))
