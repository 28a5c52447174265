"""A rank that goes, in whatever way, is named by every other rank at once, and nobody hangs."""

import os
import random
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import Mock

import numpy as np
import pytest

from farandole.config import Config
from farandole.core.context import Context
from farandole.core.wiring import connect as connecting
from farandole.core.wiring import peers
from farandole.core.wiring.peers import Arrivals
from farandole.errors import CollectiveTimeout, EngineClosed, PeerLost, RendezvousError
from farandole.meeting.rendezvous import Rendezvous, ThreadRendezvous, from_environment
from helpers.ranks import run_ranks
from helpers.recurring import recurring

ALLREDUCE, BARRIER = 0, 5
VICTIM = 1
NOTICED = 20.0  # seconds: far from a minute's timeout; how soon it is, test_kill.py reports

LARGE = 4 << 20  # elements: an allreduce of 16 MiB takes long enough to be hit in the middle


def reduce_for_ever(context: Context, elements: int) -> tuple[int, str, float]:
    """Allreduce until a rank is lost; returns who, why, and how long after the last success."""
    values = np.ones(elements, np.float32)
    last = time.monotonic()
    try:
        for step in range(1_000_000):
            context.engine.run(recurring(ALLREDUCE, op=4), f"x{step % 3}", values, values)
            last = time.monotonic()
    except PeerLost as error:
        return error.rank, error.reason, time.monotonic() - last
    raise AssertionError("nobody was lost")


def killed(context: Context, elements: int) -> tuple[int, str, float]:
    if context.rank == VICTIM:
        delay = 0.05 + 0.1 * np.random.default_rng().random()
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return reduce_for_ever(context, elements)


def exits_hard(context: Context, elements: int) -> tuple[int, str, float]:
    if context.rank == VICTIM:
        threading.Timer(0.1, os._exit, (7,)).start()
    return reduce_for_ever(context, elements)


def raises(context: Context, elements: int) -> tuple[int, str, float]:
    if context.rank == VICTIM:
        context.engine.run(
            recurring(ALLREDUCE, op=4), "x0", np.ones(elements, np.float32), np.ones(elements, np.float32)
        )
        context.shutdown()  # what leaving the `with` of a failing body does
        return VICTIM, "", 0.0
    return reduce_for_ever(context, elements)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("elements", [1, LARGE], ids=["tiny", "16 MiB"])
@pytest.mark.parametrize("body", [killed, exits_hard], ids=lambda body: body.__name__)
def test_a_process_that_dies_is_named(size: int, elements: int, body: object) -> None:
    results = run_ranks(size, body, elements, how="processes", dies=[VICTIM])
    for rank, result in enumerate(results):
        if rank != VICTIM:
            who, why, after = result
            assert (who, why) == (VICTIM, "its process was killed or crashed")
            assert after < NOTICED


@pytest.mark.parametrize("how", ["threads", "processes"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_leaves_is_named(size: int, how: str) -> None:
    results = run_ranks(size, raises, 1000, how=how)
    for rank, (who, why, after) in enumerate(results):
        if rank != VICTIM:
            assert (who, why) == (VICTIM, "it has shut down")
            assert after < NOTICED


def dies_in_init(outer: Context, placement: str, victim: int, late: int = -1) -> tuple[tuple[int, ...], float]:
    """Return the missing ranks and the time until they were named; the victim dies after the ranks have met.

    Rank `late` is slower than the others, both to connect and to hear of the death."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    outer.shutdown()
    if outer.rank == victim:
        connecting._Connector._share_segment = die  # type: ignore[assignment, method-assign]
        # It accepts nobody: a rank that needs it alone could have all its connections before it dies.
        peers.AcceptingThread = Mock  # type: ignore[misc, assignment]
    if outer.rank == late:
        lose, connect_to = Arrivals.lose, connecting.connect_to
        Arrivals.lose = lambda *told: threading.Timer(0.5, lose, told).start()  # type: ignore[assignment, method-assign]
        connecting.connect_to = lambda *asked: time.sleep(0.3) or connect_to(*asked)
    began = time.monotonic()
    with pytest.raises(RendezvousError) as missed:
        Context(from_environment(), Config(), host=placement[outer.rank])
    return missed.value.missing, time.monotonic() - began


# In "ABC" rank 0 waits for the victim or for its neighbour, in "AAA" nobody but the rendezvous can notice the death.
@pytest.mark.parametrize(
    ("placement", "victim"), [("ABC", 1), ("AABB", 2), ("AABBB", 2), ("AAA", 2), ("AAA", 0), ("AAB", 1), ("AB", 1)]
)
def test_a_death_in_init_is_told_to_other_hosts(placement: str, victim: int) -> None:
    size = len(placement)
    results = run_ranks(size, dies_in_init, placement, victim, how="processes", dies=[victim])
    for missing, seconds in results[:victim] + results[victim + 1 :]:
        assert missing == (victim,)
        assert seconds < NOTICED


def test_a_rank_whose_leader_gave_up_names_the_dead_rank() -> None:
    results = run_ranks(5, dies_in_init, "AABBB", 2, 1, how="processes", dies=[2])
    assert [missing for missing, _ in results[:2] + results[3:]] == [(2,)] * 4


def test_a_rank_that_gets_no_thread_after_its_engine_leaves_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "farandole-stalls":
            raise RuntimeError("can't start new thread")
        start(thread)

    def wait_for_the_other(rendezvous: Rendezvous) -> None:
        with Context(rendezvous, Config(collective_timeout=timedelta(seconds=5))) as context:
            context.engine.run(recurring(BARRIER), "end", None, None)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    one, two = ThreadRendezvous.group(2)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(wait_for_the_other, two)
        with pytest.raises(RendezvousError, match="raise the limit on processes"):
            Context(one)
        with pytest.raises(PeerLost, match="rank 0"):
            other.result()


def waits_for_the_absent(context: Context, heard: threading.Barrier) -> tuple[tuple[int, ...], float]:
    values = np.ones(3, np.float32)
    try:
        if context.rank == VICTIM:
            return (), 0.0
        begin = time.monotonic()
        with pytest.raises(CollectiveTimeout, match=r"'absent'.*rank 1") as caught:
            context.engine.run(recurring(ALLREDUCE, op=1), "absent", values, values)
        return caught.value.missing, time.monotonic() - begin
    finally:
        heard.wait(60)  # nobody is to wait for longer than the same limit
        context.engine.run(recurring(BARRIER), "end", None, None)


def test_a_rank_that_does_not_come_is_named_when_time_is_up() -> None:
    config = Config(collective_timeout=timedelta(seconds=1))
    results = run_ranks(3, waits_for_the_absent, threading.Barrier(3), config=config)
    for rank in (0, 2):
        missing, waited = results[rank]
        assert missing == (VICTIM,)
        assert 0.5 <= waited < NOTICED


def stands_still(context: Context, victim: int) -> tuple[int, ...]:
    values = np.ones(10, np.float32)
    context.engine.run(recurring(ALLREDUCE, op=4), "x", values, values)
    if context.rank == victim:
        # Alive, but it does nothing any more, until it is killed.
        subprocess.Popen(["sh", "-c", f"sleep 12; kill -KILL {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(CollectiveTimeout) as caught:
        context.engine.run(recurring(ALLREDUCE, op=4), "x", values, values)
    return caught.value.missing


@pytest.mark.parametrize("victim", [0, 1], ids=["coordinator", "other"])
def test_a_rank_that_stands_still_ends_the_wait(victim: int) -> None:
    # Long enough for both to come to their first operation.
    config = Config(collective_timeout=timedelta(seconds=3))
    results = run_ranks(2, stands_still, victim, how="processes", dies=[victim], config=config)
    assert results[1 - victim] == (victim,)


def stopped_in_the_middle(outer: Context, hosts: int, victim: int, config: Config) -> tuple[int, ...]:
    """Return who is blamed; the victim is stopped while all ranks reduce."""
    outer.shutdown()
    with Context(from_environment(), config, host=f"host {outer.rank * hosts // outer.size}") as context:
        values = np.ones(1 << 20, np.float32)
        try:
            for step in range(10**9):
                if context.rank == victim and step == 10:
                    stop = f"kill -STOP {os.getpid()}; sleep 6; kill -KILL {os.getpid()}"
                    subprocess.Popen(["sh", "-c", f"sleep 0.0{random.randrange(10)}; {stop}"])
                context.engine.run(recurring(ALLREDUCE, op=4), f"x{step % 3}", values, values)
        except CollectiveTimeout as late:
            return late.missing
        except PeerLost as lost:
            return (lost.rank,)
    raise AssertionError("nobody was missed")


@pytest.mark.parametrize(
    ("size", "hosts", "victim", "heartbeat", "timeout"),
    [
        pytest.param(3, 1, 0, 1, 2, id="coordinator"),
        pytest.param(4, 2, 3, 1, 2, id="second of another host"),
        pytest.param(4, 2, 2, 1, 60, id="first of another host"),
    ],
)
def test_a_rank_that_is_stopped_in_the_middle_is_named(
    size: int, hosts: int, victim: int, heartbeat: int, timeout: int
) -> None:
    config = Config(heartbeat=timedelta(seconds=heartbeat), collective_timeout=timedelta(seconds=timeout))
    results = run_ranks(size, stopped_in_the_middle, hosts, victim, config, how="processes", dies=[victim])
    assert [each for rank, each in enumerate(results) if rank != victim] == [(victim,)] * (size - 1)


def interrupted(context: Context) -> str:
    if context.rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            context.engine.run(recurring(ALLREDUCE, op=1), "never", np.ones(1), np.ones(1))
        return "interrupted"
    with pytest.raises(PeerLost):
        context.engine.run(recurring(ALLREDUCE, op=1), "other", np.ones(1), np.ones(1))
    return "lost"


def test_ctrl_c_ends_a_wait() -> None:
    assert run_ranks(2, interrupted, how="processes") == ["interrupted", "lost"]


def submits_after_the_end(context: Context) -> None:
    context.shutdown()
    context.shutdown()
    with pytest.raises(EngineClosed, match="shut down"):
        context.engine.run(recurring(ALLREDUCE, op=1), "late", np.ones(1), np.ones(1))


def test_after_shutdown_operations_are_refused() -> None:
    run_ranks(1, submits_after_the_end)


def ends_without_shutdown(context: Context) -> None:
    values = np.ones(10)
    context.engine.start(recurring(ALLREDUCE, op=1), f"pending {context.rank}", values, values)


def test_pending_operations_do_not_keep_a_rank_from_ending() -> None:
    run_ranks(2, ends_without_shutdown, how="processes")
