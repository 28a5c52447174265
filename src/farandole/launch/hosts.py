"""Hosts and their slots: `-H host:slots,...`, host files, and the names of this machine."""

import ipaddress
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from farandole.errors import ConfigError, SlotsError
from farandole.launch.backend import Host

MOST_SLOTS = 1 << 20  # of a host, and the most ranks of a job; larger numbers would only fill the memory

# Open MPI's limit on the ranks of a host beyond its slots. It does not change the number of slots.
_NO_SLOTS = ("max_slots", "max-slots", "slots_max", "slots-max")


def parse_hosts(text: str, setting: str = "hosts", slots: int = 1) -> tuple[Host, ...]:
    """Read "host1:2,host2:4,[fd00::1]:2"; a host without a number has `slots`. Errors name `setting`."""
    if not isinstance(text, str):
        raise ConfigError(setting, f"must be a text such as 'host1:2,host2:2', got {text!r}")
    return tuple(_host(each.strip(), *_split(each.strip(), setting, slots), setting) for each in text.split(","))


def read_hostfile(path: Path, slots: int = 1) -> tuple[Host, ...]:
    """Read a file of lines "host slots=2" (or "host:2"); # begins a comment. A host without a number has `slots`.

    Raises `ConfigError` for a word without a meaning here: without it a host would get another number of slots."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError("hostfile", f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("hostfile", f"cannot read {path}: it is no text in UTF-8") from error
    hosts = [_host_of_line(line, slots) for line in lines if line.partition("#")[0].strip()]
    if not hosts:
        raise ConfigError("hostfile", f"{path} names no host")
    return tuple(hosts)


def fill_slots(hosts: Sequence[Host], num_proc: int) -> list[Host]:
    """Return the host of each rank: ranks fill one host's slots after another's. Raises `SlotsError`.

    Raises `ConfigError` for more than `MOST_SLOTS` ranks."""
    if num_proc > MOST_SLOTS:
        raise ConfigError("num_proc", f"must be at most {MOST_SLOTS}, got {num_proc}")
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


def _host_of_line(line: str, slots: int) -> Host:
    """Read a line of a host file, which names a host."""
    name, *words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
    pairs = [word.partition("=")[::2] for word in words]
    numbers = [value for key, value in pairs if key == "slots"]
    unknown = [word for word, (key, _) in zip(words, pairs, strict=True) if key not in ("slots", *_NO_SLOTS)]
    if unknown:
        problem = f"{line.strip()!r} has the unknown word {unknown[0]!r}; write one host to a line, as 'host slots=2'"
        raise ConfigError("hostfile", problem)
    host = _host(line, *((name, numbers[0]) if numbers else _split(name, "hostfile", slots)), "hostfile")
    if len(numbers) > 1 or (numbers and ":" in name and not _is_ipv6(name)):
        raise ConfigError("hostfile", f"{line.strip()!r} names the slots twice; write it as 'host slots=2'")
    return host


def _is_ipv6(name: str) -> bool:
    try:
        ipaddress.IPv6Address(name.rpartition("@")[2].removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _split(entry: str, setting: str, default: int) -> tuple[str, str]:
    name, colon, slots = entry.rpartition(":")
    if not colon or slots.endswith("]"):
        return entry, str(default)
    if ":" in name and not name.endswith("]"):
        raise ConfigError(setting, f"{entry!r} is ambiguous; write the IPv6 address in brackets: [{name}]:{slots}")
    return name, slots


def _host(entry: str, name: str, slots: str, setting: str) -> Host:
    name = name.replace("[", "").replace("]", "")  # ssh takes no brackets
    if not name or not slots.isascii() or not slots.isdigit() or not slots.strip("0"):
        raise ConfigError(setting, f"{entry!r} is no host; write it as host:2, or as 'host slots=2' in a file")
    if len(slots) > len(str(MOST_SLOTS)) or int(slots) > MOST_SLOTS:
        raise ConfigError(setting, f"{entry!r} has more than {MOST_SLOTS} slots")
    return Host(name, int(slots))
