"""SIGKILL hits a random rank at a random point of its life: every other rank hears who it was, and nothing is left.

Twelve rounds by default; `KILL_ROUNDS=200 pytest tests/system/test_kill.py` is the full run, KILL_SEED repeats one. At
the end it prints how long it took from the kill until the last survivor knew, and writes it to the file KILL_JSON.
"""

import contextlib
import gc
import json
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from farandole.config import Config
from farandole.core.context import Context
from farandole.core.operations.kinds import ALLGATHER, ALLREDUCE, ALLTOALL, BARRIER, BROADCAST, REDUCESCATTER
from farandole.errors import PeerLost, RendezvousError
from farandole.meeting.rendezvous import from_environment
from helpers.leaks import Snapshot
from helpers.outcomes import Death
from helpers.ranks import run_ranks
from helpers.recurring import recurring

ROUNDS = int(os.environ.get("KILL_ROUNDS", "12"))
SEED = int(os.environ.get("KILL_SEED", "0")) or random.SystemRandom().randrange(1 << 30)

GIB = 1 << 30
NOTICED = 20.0  # seconds: tells a hang from a machine that is busy; the summary says what it took
START_TIMEOUT = timedelta(seconds=10)  # who is killed before all have met is missed when this is over

# What the victim is doing, and how many seconds of it at most.
PHASES = {"at work": 0.3, "waited for": 0.1, "in init": 0.03, "in shutdown": 0.005}
SUM = 1
SMALL, LARGE = 10, 1 << 20  # elements of 4 bytes: through the small slots, and in many stripes


def synchronous(context: Context, dice: random.Random, step: int) -> None:
    """One operation that the caller waits for."""
    kind = dice.choice([ALLREDUCE, ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, BARRIER])
    elements = dice.choice([SMALL, LARGE]) * context.size
    name = f"{kind} of {elements}"  # repeats, so that it is known by number from the second time on
    if kind == BARRIER:
        context.engine.run(recurring(kind), name, None, None)
        return
    values = np.ones(elements, np.float32)
    if kind in (ALLREDUCE, BROADCAST):
        root = step % context.size if kind == BROADCAST else 0
        context.engine.run(recurring(kind, op=SUM, root=root), f"{name} {root}", values, values)
    elif kind == ALLTOALL:
        context.engine.run(recurring(kind, splits=[elements // context.size] * context.size), name, values, None)
    else:
        context.engine.run(recurring(kind, op=SUM), name, values, None)


def asynchronous(context: Context, dice: random.Random) -> None:
    """Many operations in flight, waited for in another order."""
    tensors = [np.ones(dice.choice([1, SMALL, 10_000]), np.float32) for _ in range(dice.randrange(2, 30))]
    handles = [
        context.engine.start(recurring(ALLREDUCE, op=SUM), f"async {i}", each, each) for i, each in enumerate(tensors)
    ]
    dice.shuffle(handles)
    for handle in handles:
        handle.wait()


@dataclass(frozen=True, slots=True)
class Case:
    """One round: where the ranks are, who dies doing what, and the name of the socket that waits for all of them."""

    size: int
    hosts: int
    victim: int
    phase: str
    ballast: int
    seed: int

    def __str__(self) -> str:
        hosts = f"{self.hosts} host{'s' * (self.hosts > 1)}"
        return f"{self.phase}, {hosts}, victim of {'1 GiB' if self.ballast else 'little memory'}"


def tell(rank: int, announce: bytes) -> None:
    """Say that this rank is where it may be killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(f"{rank} {os.getpid()}".encode(), announce)


def work(context: Context, seed: int) -> None:
    """Run the same random operations as all other ranks until one is lost."""
    dice = random.Random(seed)
    for step in range(1_000_000):
        if dice.random() < 0.2:
            asynchronous(context, dice)
        elif dice.random() < 0.1:
            time.sleep(0.01)  # all ranks are idle, as in a step that computes
        else:
            synchronous(context, dice, step)


def spend(context: Context, case: Case, announce: bytes) -> None:
    """Be in the phase in which the victim dies, until that is heard; returns when there is nothing to hear."""
    if case.phase != "in init":
        context.engine.run(recurring(BARRIER), "all are here", None, None)
        tell(context.rank, announce)
    if case.phase == "waited for":
        if context.rank == case.victim:
            time.sleep(3600)
        values = np.ones(SMALL, np.float32)
        context.engine.run(recurring(ALLREDUCE, op=SUM), "it does not come to this", values, values)
    elif case.phase == "in shutdown":
        context.shutdown()
        return
    work(context, case.seed)
    raise AssertionError("nobody was lost")


def end_of(case: Case, host: str, announce: bytes) -> tuple[tuple[int, ...], float]:
    """Begin a context and end it, however that comes about; returns who was lost, if that was heard, and when."""
    try:
        with Context(from_environment(), Config(start_timeout=START_TIMEOUT), host=host) as context:
            # What was never there cannot stay behind, however a rank dies.
            assert "/dev/shm" not in Path("/proc/self/maps").read_text()
            try:
                spend(context, case, announce)
            except PeerLost as error:
                knew = time.monotonic()
                with pytest.raises(PeerLost) as later:
                    context.engine.run(recurring(BARRIER), "after the end", None, None)
                assert later.value.rank == error.rank
                return (error.rank,), knew
            return (), time.monotonic()
    except (PeerLost, RendezvousError) as error:
        if case.phase != "in init":
            raise
        return (error.rank,) if isinstance(error, PeerLost) else error.missing, time.monotonic()


def live(outer: Context, case: Case, announce: bytes) -> tuple[tuple[int, ...], float]:
    """Be one rank, and leave as little as there was before."""
    # The kernel takes its time to free it, and ends no connection before it has.
    memory = np.ones(case.ballast if outer.rank == case.victim else 0, np.uint8)
    outer.engine.run(recurring(BARRIER), "all processes are here", None, None)
    outer.shutdown()
    before = Snapshot.take()
    if case.phase == "in init":
        tell(outer.rank, announce)
    found = end_of(case, f"host {outer.rank % case.hosts}", announce)
    if outer.rank == case.victim:
        time.sleep(3600)  # it was faster than its death
    del memory
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
    """Collects the milliseconds of all rounds by kind of case; prints, and writes, what they come to."""
    collected: dict[str, list[float]] = {}
    yield collected
    found = {kind: summary(ms) for kind, ms in sorted(collected.items())}
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    with contextlib.nullcontext() if capture is None else capture.global_and_fixture_disabled():
        for kind, values in found.items():
            figures = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            print(f"\nkill -9 {kind}: ms until the last survivor knew: {figures}", end="", flush=True)
        print(f"\nKILL_SEED={SEED}", end="", flush=True)
    if "KILL_JSON" in os.environ:
        report = {"seed": SEED, "rounds": ROUNDS, "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()}
        text = json.dumps({**report, "milliseconds": found, "all": collected}, indent=1)
        Path(os.environ["KILL_JSON"]).write_text(text + "\n", encoding="utf-8")


def summary(ms: list[float]) -> dict[str, float]:
    """How many there were, and how long it took until every survivor knew."""
    ordered = sorted(ms)
    p90 = ordered[min(len(ms) - 1, int(0.9 * len(ms)))]
    return {"kills": len(ms), "p50": statistics.median(ms), "p90": p90, "max": ordered[-1]}


@pytest.mark.parametrize("round", range(ROUNDS))
def test_every_survivor_names_the_victim(round: int, times: dict[str, list[float]]) -> None:
    dice = random.Random(SEED + round)
    size = dice.choice([2, 3, 4])
    case = Case(
        size=size,
        hosts=dice.choice([1, 1, 2, min(3, size)]),
        victim=dice.randrange(size),
        phase=list(PHASES)[round % len(PHASES)],
        ballast=dice.choice([0, 0, GIB]),
        seed=SEED + round,
    )
    killer = Killer(size, case.victim, PHASES[case.phase] * dice.random())
    before = in_shared_memory()

    with killer.lurking() as announce:
        results = run_ranks(size, live, case, announce, how="processes", dies=[case.victim])

    context = f"KILL_SEED={SEED} round {round}: {case}"
    assert results[case.victim] == Death(-signal.SIGKILL), context
    survivors = [each for rank, each in enumerate(results) if rank != case.victim]
    if case.phase == "in init":
        # Who gives up for want of the victim tells those that still connect; those that run already may miss that one.
        assert all(lost for lost, _ in survivors), (context, survivors)
        assert any(case.victim in lost for lost, _ in survivors), (context, survivors)
    else:
        left = case.phase == "in shutdown"  # who has left may be killed: that is nothing to the others
        assert all(lost == (case.victim,) or (left and not lost) for lost, _ in survivors), (context, survivors)
    took = max(knew for _, knew in survivors) - killer.killed_at
    times.setdefault(str(case), []).append(1000 * max(0.0, took))
    assert took < NOTICED + START_TIMEOUT.total_seconds() * (case.phase == "in init"), context
    assert in_shared_memory() <= before, context
