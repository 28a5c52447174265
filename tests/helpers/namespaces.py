"""Several hosts on one machine: network namespaces on one bridge. Needs root and `ip`."""

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from farandole.config import Config
from helpers.outcomes import RanksFailed
from helpers.processes import run_processes

__all__ = ["DEVICE", "problem", "run_on_hosts"]

DEVICE = "fd-host"  # each namespace's end of its cable
NET = f"10.214.{os.getpid() % 250}"
PREFIX = "fdtest-"
PLUGS = itertools.count()  # the kernel takes its time to remove those of a namespace that is gone


@functools.cache
def problem() -> str:
    """Say why there can be no such hosts here; empty when there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and the command ip"
    try:
        with _namespaces(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces can be made here: {' '.join(error.cmd)}: {error.stderr.strip()}"


def run_on_hosts(
    hosts: int,
    ranks_each: int,
    body: Callable[..., object],
    *args: object,
    heartbeat: timedelta = timedelta(seconds=3),
    dies: Collection[int] = (),
    timeout: float = 60.0,
) -> list[object]:
    """Run `body(context, *args)` on `ranks_each` ranks in each of `hosts` namespaces; return results in rank order.

    The ranks of a host are neighbours, as a launcher has it. Raises `RanksFailed` as `run_ranks` does."""
    size = hosts * ranks_each
    with _namespaces(hosts) as names:
        outcomes = run_processes(
            size,
            body,
            args,
            timeout=timeout,
            config=Config(heartbeat=heartbeat),
            dies=dies,
            address=f"{NET}.254",
            prefixes=[("ip", "netns", "exec", names[rank // ranks_each]) for rank in range(size)],
        )
    failures = [each for each in outcomes if each.failed]
    if failures:
        raise RanksFailed(size, failures)
    return [each.value for each in sorted(outcomes, key=lambda each: each.rank)]


@contextmanager
def _namespaces(count: int) -> Iterator[Sequence[str]]:
    """Make namespaces, each with an address on a bridge that this process can reach; they go with the block."""
    _sweep()
    bridge = f"{PREFIX}{os.getpid()}"
    names = [f"{PREFIX}{os.getpid()}-{number}" for number in range(count)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("address", "add", f"{NET}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(names):
            plug = f"fd{os.getpid()}-{next(PLUGS)}"
            _ip("netns", "add", name)
            _ip("link", "add", plug, "type", "veth", "peer", "name", DEVICE, "netns", name)
            _ip("link", "set", plug, "master", bridge, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "address", "add", f"{NET}.{number + 1}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", DEVICE, "up")
        yield names
    finally:
        _remove(bridge, names)


def _sweep() -> None:
    """Remove what test processes that are gone have left behind."""
    namespaces = [path.name for path in Path("/run/netns").glob(f"{PREFIX}*")]
    bridges = [path.name for path in Path("/sys/class/net").glob(f"{PREFIX}*")]
    for owner in {name.removeprefix(PREFIX).split("-")[0] for name in namespaces + bridges}:
        if not Path("/proc", owner).exists():
            _remove(f"{PREFIX}{owner}", [name for name in namespaces if name.startswith(f"{PREFIX}{owner}-")])


def _remove(bridge: str, names: Sequence[str]) -> None:
    # The cables go with their namespaces.
    for command in (*(("netns", "delete", name) for name in names), ("link", "delete", bridge)):
        with contextlib.suppress(subprocess.CalledProcessError):  # it may never have been made
            _ip(*command)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
