"""Process sets over hosts, through deaths, removals and failures; nothing of them is left."""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import farandole.numpy as hvd
from farandole._native import Engine
from farandole.config import Config
from farandole.core import default
from farandole.core.context import Context
from farandole.core.default import use
from farandole.core.monitoring.monitors import Monitors
from farandole.core.operations import kinds
from farandole.core.operations.request import Request
from farandole.core.process_sets import agreement as sets
from farandole.core.wiring import connect as connecting
from farandole.errors import CollectiveTimeout, ConfigError, EngineClosed, InvalidRequest, PeerLost, RendezvousError
from farandole.meeting.rendezvous import from_environment
from farandole.numpy import Sum
from farandole.timeline.files import timeline_path
from helpers.deaths import wait_for_others
from helpers.ranks import run_ranks

LIVES = 50


def on_two_hosts(outer: Context) -> list[list[float]]:
    """Reduce in sets within a host, between hosts, and across in other proportions."""
    outer.shutdown()
    results = []
    with Context(from_environment(), Config(), host=f"host {outer.rank // 2}") as context, use(context):
        for ranks in ([0, 1], [0, 3], [1, 2, 3], [2]):
            some = hvd.add_process_set(ranks)
            if not some.included():
                continue
            for _ in range(3):
                total = hvd.allreduce(np.full(70000, context.rank + 1.0), op=Sum, name="t", process_set=some)
            results.append([float(total[0]), float(total[-1])])
            assert hvd.allgather_object(context.rank, process_set=some) == ranks
            assert hvd.broadcast_object(context.rank, ranks[-1], process_set=some) == ranks[-1]
        hvd.barrier()
    return results


def test_sets_within_and_across_hosts() -> None:
    sums = {0: [3, 5], 1: [3, 9], 2: [9, 3], 3: [5, 9]}
    assert run_ranks(4, on_two_hosts, how="processes") == [[[s, s] for s in sums[rank]] for rank in range(4)]


def by_communicators(context: Context) -> list[object]:
    """Add sets as ranks of MPI give them: the halves of a split, then a communicator of which some ranks have no part.

    Numbers of MPI differ from the ranks here."""
    place = 10 - context.rank
    half, one = hvd.ProcessSet([]), hvd.ProcessSet([])
    halves = context.sets.add_parts(half, place, [8, 10] if place % 2 == 0 else [7, 9])
    alone = context.sets.add_parts(one, place, [9] if place == 9 else [])
    with pytest.raises(ValueError, match=r"processes \[0, 0, 0, 0\] of MPI, .*horovodrun --mpi"):
        context.sets.add_parts(object(), 0, [0])
    return [halves, half.process_set_id, alone, one.process_set_id, sorted(context.sets.ranks_by_number.items())]


def test_sets_of_communicators() -> None:
    sets = [(0, (0, 1, 2, 3)), (1, (0, 2)), (2, (1, 3)), (3, (1,))]
    of_rank = [[[0, 2], 1, [1], 3, sets], [[1, 3], 2, [1], 3, sets]]
    assert run_ranks(4, by_communicators) == of_rank * 2


def held() -> dict[str, int]:
    """How much this process holds of what a set could leak."""
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "segments": Path("/proc/self/maps").read_text().count("memfd:farandole"),
    }


def many_sets(outer: Context, hosts: int) -> tuple[dict[str, int], dict[str, int]]:
    outer.shutdown()

    def live() -> None:
        some = hvd.add_process_set([0, 2])
        assert some.process_set_id == 1
        if some.included():
            hvd.allreduce(np.ones(1000), name="x", process_set=some)
        assert hvd.remove_process_set(some)

    with Context(from_environment(), Config(), host=f"host {outer.rank % hosts}") as context, use(context):
        live()
        before = held()
        for _ in range(LIVES - 1):
            live()
        return before, held()


@pytest.mark.parametrize("hosts", [1, 3])
def test_many_sets_leave_nothing(hosts: int) -> None:
    for before, after in run_ranks(3, many_sets, hosts, how="processes", timeout=60):
        assert after == before


def test_many_sets_of_threads_leave_nothing() -> None:
    def body(context: Context) -> None:
        some = hvd.ProcessSet([0, 1])
        for turn in range(LIVES + 1):
            hvd.add_process_set(some)
            hvd.remove_process_set(some)
            hvd.barrier()
            if turn in (0, LIVES) and context.rank == 0:
                seen.append(held())
            hvd.barrier()

    seen: list[dict[str, int]] = []
    run_ranks(3, body)
    assert seen[0] == seen[1]


def test_a_context_ends_its_sets() -> None:
    def body(context: Context) -> None:
        some = hvd.add_process_set([0, 1])
        if not some.included():
            return
        handle = hvd.allreduce_async(np.ones(3), name=f"only on {context.rank}", process_set=some)
        context.shutdown()
        with pytest.raises((EngineClosed, PeerLost)) as caught:
            hvd.synchronize(handle)
        assert caught.value.process_set == "process set 1 (ranks 0 and 1)"
        assert "process set 1 (ranks 0 and 1)" in str(caught.value)
        assert some.process_set_id is None
        with pytest.raises(InvalidRequest, match="not registered"):
            hvd.allreduce(np.ones(3), process_set=some)
        with pytest.raises(EngineClosed):
            hvd.add_process_set([0])

    run_ranks(3, body)


def test_removing_waits_for_what_all_have_asked_for_and_fails_the_rest() -> None:
    def body(context: Context) -> None:
        some, other = hvd.add_process_set([0, 1]), hvd.add_process_set([0, 2])
        common, alone = [], None
        if context.rank < 2:
            names = [f"x{place}" for place in range(20)]
            random.Random(context.rank).shuffle(names)
            common = [hvd.allreduce_async(np.full(30000, 2.0), op=Sum, name=each, process_set=some) for each in names]
            alone = hvd.allreduce_async(np.ones(3), name=f"only on {context.rank}", process_set=some)
        elsewhere = None
        if context.rank == 0:  # pending in another set all the while
            elsewhere = hvd.allreduce_async(np.ones(3), op=Sum, name="late", process_set=other)
        assert hvd.remove_process_set(some)
        assert all(hvd.poll(handle) for handle in common)
        for handle in common:
            np.testing.assert_array_equal(hvd.synchronize(handle), 4.0)
        if alone is not None:
            with pytest.raises((EngineClosed, PeerLost), match=r"process set 1 \(ranks 0 and 1\)"):
                hvd.synchronize(alone)
        if context.rank == 2:
            elsewhere = hvd.allreduce_async(np.ones(3), op=Sum, name="late", process_set=other)
        if elsewhere is not None:
            np.testing.assert_array_equal(hvd.synchronize(elsewhere), 2.0)

    run_ranks(3, body)


def test_a_member_that_cannot_connect_fails_all_ranks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sets.connect

    def fails_on_rank_2(rendezvous, config, **more):  # type: ignore[no-untyped-def]
        if rendezvous.whole.rank == 2 and rendezvous.generation == 2:
            raise OSError("no file descriptor is left")
        return connect(rendezvous, config, **more)

    def body(context: Context) -> str:
        hvd.add_process_set([0, 1])
        some = hvd.ProcessSet([0, 2])
        with pytest.raises(RendezvousError) as caught:
            hvd.add_process_set(some)
        assert some.process_set_id is None
        # Nothing is half made: the next attempt succeeds, under the same number.
        assert hvd.add_process_set(some).process_set_id == 2
        if some.included():
            np.testing.assert_array_equal(hvd.allreduce(np.ones(2), op=Sum, process_set=some), 2)
        return str(caught.value)

    monkeypatch.setattr(sets, "connect", fails_on_rank_2)
    texts = set(run_ranks(3, body))
    assert texts == {"process set 2 (ranks 0 and 2) was not made (rank 2: OSError: no file descriptor is left)"}


def test_a_member_that_gets_no_thread_fails_all_ranks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    follow, engines, refused = Monitors.follow, list[Engine](), threading.Event()

    def fails_once(self: Monitors, engine: Engine, rank: int, process_set: str = "") -> None:
        if process_set and rank == 0 and not refused.is_set():
            refused.set()
            engines.append(engine)
            raise RuntimeError("can't start new thread")
        follow(self, engine, rank, process_set)

    def body(context: Context) -> str:
        with pytest.raises(RendezvousError) as caught:
            hvd.add_process_set([1, 2])
        some = hvd.add_process_set([1, 2])
        if some.included():
            np.testing.assert_array_equal(hvd.allreduce(np.ones(2), op=Sum, process_set=some), 2)
        return str(caught.value)

    monkeypatch.setattr(Monitors, "follow", fails_once)
    (text,) = set(run_ranks(3, body))
    assert "(rank 1: RendezvousError: the system refuses another thread or process; raise the limit" in text
    with pytest.raises(EngineClosed, match="shut down"):
        engines[0].run(Request(kinds.BARRIER), "x", None, None)


def test_a_time_limit_names_the_jobs_ranks() -> None:
    def body(context: Context) -> None:
        some = hvd.add_process_set([1, 2])
        if context.rank == 1:
            with pytest.raises(CollectiveTimeout) as caught:
                hvd.allreduce(np.ones(2), name="x", process_set=some)
            assert caught.value.missing == (2,)
            assert "'allreduce.x' in process set 1 (ranks 1 and 2): waited" in str(caught.value)
            gave_up.set()
        assert gave_up.wait(20)

    gave_up = threading.Event()
    run_ranks(3, body, config=Config.from_environment({}, collective_timeout=2.0))


def loses_rank_3(context: Context, folder: Path) -> str:
    with_it, without_it = hvd.add_process_set([1, 3]), hvd.add_process_set([0, 1, 2])
    hvd.barrier()
    wait_for_others(context, 3, folder)
    if context.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    text = ""
    if context.rank == 1:
        with pytest.raises(PeerLost) as lost:
            for turn in range(10**6):
                hvd.allreduce(np.ones(100), name=f"x{turn % 3}", process_set=with_it)
        assert lost.value.rank == 3
        text = str(lost.value)
    for turn in range(100):
        total = hvd.allreduce(np.full(100, turn), op=Sum, name="y", process_set=without_it)
        np.testing.assert_array_equal(total, 3 * turn)
    # The last to leave: shutting down earlier would be another loss to the others.
    hvd.barrier(process_set=without_it)
    return text


def test_a_death_reaches_the_sets_that_the_dead_was_in_and_no_other(tmp_path: Path) -> None:
    texts = run_ranks(4, loses_rank_3, tmp_path, how="processes", dies=(3,))
    assert texts[0] == texts[2] == ""
    assert str(texts[1]).startswith("'allreduce.x")
    assert "' in process set 1 (ranks 1 and 3): rank 3 is lost" in str(texts[1])


def dies_while_it_connects(outer: Context, hosts: int) -> tuple[int, float]:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    outer.shutdown()
    with Context(from_environment(), Config(), host=f"host {outer.rank * hosts // 4}") as context, use(context):
        if context.rank == 3:
            connecting._Connector._share_segment = die  # type: ignore[assignment, method-assign]
        began = time.monotonic()
        with pytest.raises(PeerLost) as lost:
            hvd.add_process_set([1, 3])
        return lost.value.rank, time.monotonic() - began


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_member_that_dies_while_it_connects_is_lost_to_all_ranks(hosts: int) -> None:
    # Rank 1 waits for it to dial; that the others are told by the engine of all ranks, it hears too.
    for lost, seconds in run_ranks(4, dies_while_it_connects, hosts, how="processes", dies=(3,))[:3]:
        assert lost == 3
        assert seconds < 20  # a moment, on a machine that may be busy, and far from start_timeout


def starts_with_sets(outer: Context) -> None:
    hvd.shutdown()
    even, odd = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])
    twice = hvd.ProcessSet([2, 0])
    with pytest.raises(ValueError, match=r"duplicate process set.*\[0, 2\]"):
        hvd.init(process_sets=[even, twice])
    assert not hvd.is_initialized()
    hvd.init(process_sets=[even, odd])
    try:
        assert [even.process_set_id, odd.process_set_id, twice.process_set_id] == [1, 2, None]
        mine = even if even.included() else odd
        assert hvd.allgather_object(hvd.rank(), process_set=mine) == mine.ranks
        hvd.init(process_sets=[even])
        hvd.init(process_sets="dynamic")
        with pytest.raises(ConfigError, match="running already; use add_process_set"):
            hvd.init(process_sets=[hvd.ProcessSet([0, 1])])
        assert hvd.add_process_set([0, 1]).process_set_id == 3
        hvd.barrier()
    finally:
        hvd.shutdown()
    assert even.process_set_id is None


def test_sets_at_the_start() -> None:
    run_ranks(3, starts_with_sets, how="processes")


@pytest.mark.parametrize("wrong", ["static", [[0]], 3, ["0"]], ids=str)
def test_what_init_does_not_take(wrong: object) -> None:
    with pytest.raises(ConfigError, match="process_sets: should be a list of ProcessSet"):
        default.init(process_sets=wrong)  # type: ignore[arg-type]
    assert not default.is_initialized()


def test_nobody_chooses_a_number() -> None:
    with pytest.raises(ValueError, match="the number that add_process_set"):
        hvd.ProcessSet([0]).process_set_id = 10  # type: ignore[misc]


def test_the_timeline_says_in_which_set(tmp_path: Path) -> None:
    def body(context: Context) -> None:
        some = hvd.add_process_set([0, 1])
        if some.included():
            hvd.allreduce(np.ones(4), name="x", process_set=some)
        hvd.remove_process_set(some)

    path = str(tmp_path / "trace.json")
    run_ranks(3, body, config=Config(timeline=path))
    for rank in range(3):
        events = json.loads(timeline_path(path, rank).read_text())
        tracks = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
        assert ("process set 1 (ranks 0 and 1): allreduce.x" in tracks) == (rank < 2)


SETS = [[0, 1], [1, 2], [0, 2], [0, 1, 2]]


@settings(max_examples=10)
@given(
    orders=st.tuples(*[st.permutations([(place, turn) for place in range(4) for turn in range(5)])] * 3),
    waits=st.tuples(*[st.permutations([(place, turn) for place in range(4) for turn in range(5)])] * 3),
)
def test_sets_that_overlap_go_on_in_any_order(
    orders: tuple[list[tuple[int, int]], ...], waits: tuple[list[tuple[int, int]], ...]
) -> None:
    def body(context: Context) -> None:
        members = [hvd.global_process_set if len(ranks) == 3 else hvd.add_process_set(ranks) for ranks in SETS]
        handles = {
            (place, turn): hvd.allreduce_async(
                np.full(10 ** (turn % 4), 10.0 * place + turn), op=Sum, name=f"x{turn}", process_set=members[place]
            )
            for place, turn in orders[context.rank]
            if context.rank in SETS[place]
        }
        for place, turn in waits[context.rank]:
            if context.rank in SETS[place]:
                result = hvd.synchronize(handles[place, turn])
                np.testing.assert_array_equal(result, (10.0 * place + turn) * len(SETS[place]))

    run_ranks(3, body)
