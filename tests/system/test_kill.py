"""SIGKILL hits a random rank at a random point of a mixed loop: every other rank hears who it was, and nothing is left.

Ten rounds by default; `KILL_ROUNDS=200 pytest tests/system/test_kill.py` is the full run, KILL_SEED repeats one. At the
end it prints how long it took from the kill until the last survivor had raised `PeerLost`.
"""

import contextlib
import gc
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from farandole.config import Config
from farandole.core.context import Context
from farandole.core.kinds import ALLGATHER, ALLREDUCE, ALLTOALL, BARRIER, BROADCAST, REDUCESCATTER
from farandole.errors import PeerLost
from farandole.rendezvous import from_environment
from helpers.leaks import Snapshot
from helpers.outcomes import Death
from helpers.ranks import run_ranks

ROUNDS = int(os.environ.get("KILL_ROUNDS", "10"))
SEED = int(os.environ.get("KILL_SEED", "0")) or random.SystemRandom().randrange(1 << 30)

GIB = 1 << 30
NOTICED = 2.0  # seconds: a machine with more processes than cores takes its time; the summary says what it took
LONGEST_LIFE = 0.3  # seconds that the victim lives once all ranks are in their loop
SUM = 1
SMALL, LARGE = 10, 1 << 20  # elements of 4 bytes: through the small slots, and in many stripes


def synchronous(context: Context, dice: random.Random, step: int) -> None:
    """One operation that the caller waits for."""
    kind = dice.choice([ALLREDUCE, ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, BARRIER])
    elements = dice.choice([SMALL, LARGE]) * context.size
    name = f"{kind} of {elements}"  # repeats, so that it is known by number from the second time on
    if kind == BARRIER:
        context.engine.run(kind, name, None, None)
        return
    values = np.ones(elements, np.float32)
    if kind in (ALLREDUCE, BROADCAST):
        root = step % context.size if kind == BROADCAST else 0
        context.engine.run(kind, f"{name} {root}", values, values, op=SUM, root=root)
    elif kind == ALLTOALL:
        context.engine.run(kind, name, values, None, splits=[elements // context.size] * context.size)
    else:
        context.engine.run(kind, name, values, None, op=SUM)


def asynchronous(context: Context, dice: random.Random) -> None:
    """Many operations in flight, waited for in another order."""
    tensors = [np.ones(dice.choice([1, SMALL, 10_000]), np.float32) for _ in range(dice.randrange(2, 30))]
    handles = [context.engine.submit(ALLREDUCE, f"async {i}", each, each, op=SUM) for i, each in enumerate(tensors)]
    dice.shuffle(handles)
    for handle in handles:
        handle.wait()


def loop(context: Context, seed: int, announce: bytes) -> tuple[int, float]:
    """Run the same random operations as all other ranks until one is lost; return who, and when this rank knew."""
    dice = random.Random(seed)
    context.engine.run(BARRIER, "all are here", None, None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(f"{context.rank} {os.getpid()}".encode(), announce)
    try:
        for step in range(1_000_000):
            if dice.random() < 0.2:
                asynchronous(context, dice)
            elif dice.random() < 0.1:
                time.sleep(0.01)  # all ranks are idle, as in a step that computes
            else:
                synchronous(context, dice, step)
    except PeerLost as error:
        knew = time.monotonic()
        with pytest.raises(PeerLost) as later:
            context.engine.run(BARRIER, "after the end", None, None)
        assert later.value.rank == error.rank
        return error.rank, knew
    raise AssertionError("nobody was lost")


def live(outer: Context, hosts: int, ballast: dict[int, int], seed: int, announce: bytes) -> tuple[int, float]:
    """Be one rank, on one of `hosts` pretended hosts, and leave as little as there was before."""
    host = f"host {outer.rank % hosts}"
    outer.shutdown()
    before = Snapshot.take()
    # The kernel takes its time to free it, and ends no connection before it has.
    memory = np.ones(ballast.get(outer.rank, 0), np.uint8)
    with Context(from_environment(), Config(), host=host) as context:
        found = loop(context, seed, announce)
        # What was never there cannot stay behind, however a rank dies.
        assert "/dev/shm" not in Path("/proc/self/maps").read_text()
    del context, memory
    gc.collect()
    leaks = before.leaks(shared_session=False)
    assert not leaks, leaks
    return found


class Killer:
    """Waits until all ranks are in their loop, then kills one of them at a random moment, from another process."""

    def __init__(self, size: int, victim: int, delay: float) -> None:
        self.size, self.victim, self.delay = size, victim, delay
        self.killed_at = 0.0
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind("")  # Linux picks a free abstract name
        self.thread = threading.Thread(target=self.run, name="killer")

    def run(self) -> None:
        pids: dict[int, int] = {}
        while len(pids) < self.size:
            message = self.sock.recv(100)
            if not message:
                return  # it is over: the ranks' own failure says why not all of them came
            rank, pid = message.split()
            pids[int(rank)] = int(pid)
        time.sleep(self.delay)
        self.killed_at = time.monotonic()
        os.kill(pids[self.victim], signal.SIGKILL)

    @contextlib.contextmanager
    def lurking(self) -> Iterator[bytes]:
        """Give the name to which each rank announces itself."""
        with self.sock:
            self.thread.start()
            try:
                yield self.sock.getsockname()
            finally:
                self.sock.sendto(b"", self.sock.getsockname())
                self.thread.join(30)


def in_shared_memory() -> set[str]:
    """What farandole has left where POSIX shared memory lives."""
    return {each.name for each in Path("/dev/shm").iterdir() if "farandole" in each.name}


@pytest.fixture(scope="module")
def times(request: pytest.FixtureRequest) -> Iterator[dict[str, list[float]]]:
    """Collects the seconds of all rounds by layout, and prints what they come to."""
    collected: dict[str, list[float]] = {}
    yield collected
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    with contextlib.nullcontext() if capture is None else capture.global_and_fixture_disabled():
        for layout, seconds in sorted(collected.items()):
            print(f"\nkill -9, {layout}: {summary(seconds)} (KILL_SEED={SEED})", end="", flush=True)


def summary(seconds: list[float]) -> str:
    """How long it took until every survivor knew."""
    ms = sorted(1000 * each for each in seconds)
    p99 = ms[min(len(ms) - 1, int(0.99 * len(ms)))]
    return f"{len(ms)} kills, p50 {statistics.median(ms):.2f} ms, p99 {p99:.2f} ms, max {ms[-1]:.2f} ms"


@pytest.mark.parametrize("round", range(ROUNDS))
def test_every_survivor_names_the_victim(round: int, times: dict[str, list[float]]) -> None:
    dice = random.Random(SEED + round)
    size = dice.choice([2, 3, 4])
    hosts = dice.choice([1, 1, 2])
    victim = dice.randrange(size)
    ballast = dice.choice([{}, {}, {victim: GIB}])
    killer = Killer(size, victim, LONGEST_LIFE * dice.random())
    before = in_shared_memory()

    with killer.lurking() as announce:
        args = (hosts, ballast, SEED + round, announce)
        results = run_ranks(size, live, *args, how="processes", dies=[victim], timeout=40)

    layout = f"{hosts} host{'s' * (hosts > 1)}, victim of {'1 GiB' if ballast else 'little memory'}"
    case = f"KILL_SEED={SEED} round {round}: rank {victim} of {size}, {layout}"
    assert results[victim] == Death(-signal.SIGKILL), case
    survivors = [each for rank, each in enumerate(results) if rank != victim]
    assert [who for who, _ in survivors] == [victim] * (size - 1), case
    took = max(knew for _, knew in survivors) - killer.killed_at
    times.setdefault(layout, []).append(took)
    assert took < NOTICED, case
    assert in_shared_memory() <= before, case
