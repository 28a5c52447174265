"""Simulated hosts on one machine: network namespaces joined by a bridge or a cable. Needs root and iproute2's `ip`."""

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

DEVICE = "fd-host"  # the default name of each namespace's end of its cable
PREFIX = "fdhost-"
PLUGS = itertools.count()  # new names: the kernel removes the plugs of a deleted namespace late
BRIDGES, LETTERS = itertools.count(), "abcdefgh"  # a process has no more than eight bridges at a time


@functools.cache
def problem() -> str:
    """Return why this machine cannot have such hosts, or "" if it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and the command ip (package iproute2)"
    try:
        with namespaces(1) as names, bridge(names):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces can be made here: {' '.join(error.cmd)}: {error.stderr.strip()}"


@contextmanager
def namespaces(count: int) -> Iterator[Sequence[str]]:
    """Make namespaces without a cable; yield their names. The block's end removes them and all devices in them."""
    _sweep()
    names = [f"{PREFIX}{os.getpid()}-{number}" for number in range(count)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        _remove(*(("netns", "delete", name) for name in names))


@contextmanager
def bridge(names: Sequence[str], device: str = DEVICE, gbit: int = 0) -> Iterator[str]:
    """Connect `device` of each namespace to one bridge; the i-th namespace gets the address NET.i+1.

    Each cable carries `gbit` Gbit/s in each direction, or as much as the machine can. Yields the bridge's own address,
    NET.254, at which the namespaces reach this process."""
    number = next(BRIDGES) % len(LETTERS)
    bridge, net = f"{PREFIX}{os.getpid()}{LETTERS[number]}", f"10.{214 + number}.{os.getpid() % 250}"
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("address", "add", f"{net}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for place, name in enumerate(names):
            plug = f"fd{os.getpid()}-{next(PLUGS)}"
            ip("link", "add", plug, "type", "veth", "peer", "name", device, "netns", name)
            ip("link", "set", plug, "master", bridge, "up")
            _address(name, device, f"{net}.{place + 1}")
            if gbit > 0:
                shape(device, gbit, "-n", name)
                shape(plug, gbit)
        yield f"{net}.254"
    finally:
        _remove(("link", "delete", bridge))


def join(names: Sequence[str], device: str = DEVICE) -> list[str]:
    """Join two namespaces by one cable, with nothing between them; return their addresses."""
    one, other = names
    ip("link", "add", device, "netns", one, "type", "veth", "peer", "name", device, "netns", other)
    addresses = ["10.213.77.1", "10.213.77.2"]
    for name, address in zip(names, addresses, strict=True):
        _address(name, device, address)
    return addresses


def shape(device: str, gbit: int, *place: str) -> None:
    """Let `device` send no more than `gbit` Gbit/s; `place` are options of `tc`, such as ("-n", namespace)."""
    limit = ("rate", f"{gbit}gbit", "burst", "256kb", "limit", "8mb")
    command = ["tc", *place, "qdisc", "add", "dev", device, "root", "tbf", *limit]
    subprocess.run(command, check=True, capture_output=True, text=True)


def inside(name: str) -> tuple[str, ...]:
    """Return the command prefix that runs a command in a namespace."""
    return ("ip", "netns", "exec", name)


def ip(*arguments: str) -> None:
    """Run `ip`. Raises `CalledProcessError` with the output of `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _address(name: str, device: str, address: str) -> None:
    ip("-n", name, "address", "add", f"{address}/24", "dev", device)
    ip("-n", name, "link", "set", device, "up")


def _sweep() -> None:
    """Remove namespaces and bridges of processes that no longer exist."""
    for folder, kind in (("/run/netns", "netns"), ("/sys/class/net", "link")):
        for name in [path.name for path in Path(folder).glob(f"{PREFIX}*")]:
            owner = name.removeprefix(PREFIX).split("-")[0].rstrip(LETTERS)
            if not Path("/proc", owner).exists():
                _remove((kind, "delete", name))


def _remove(*commands: tuple[str, ...]) -> None:
    for command in commands:
        with contextlib.suppress(subprocess.CalledProcessError):  # it may not exist
            ip(*command)
