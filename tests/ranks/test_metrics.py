"""What a rank says of its work is what it was made to do."""

import time

import numpy as np
import pytest

import farandole.numpy as hvd
from farandole.core.context import Context
from farandole.core.default import use
from helpers.ranks import run_ranks

LATE = 0.2  # seconds


def test_totals() -> None:
    def body(context: Context) -> tuple[dict[str, float], dict[str, float]]:
        with use(context):
            before = hvd.metrics()
            for _ in range(3):
                hvd.grouped_allreduce([np.ones(100, np.float32)] * 5, name="group", op=hvd.Sum)
            hvd.broadcast(np.ones(7, np.int64), 0, name="spread")
            return before, hvd.metrics()

    for before, after in run_ranks(2, body):
        assert before["operations"] == before["bytes"] == before["fused"] == 0
        assert after["operations"] == 16
        assert after["bytes"] == 3 * 5 * 400 + 56
        # Of the group, which is one transfer a time, all but one operation.
        assert after["buckets"] == 4 and after["fused"] == 12 / 16
        assert after["agreed_in_full"] == 6  # five members and the broadcast, for the first time
        assert after["agreed_in_lane"] + after["agreed_by_number"] == 10
        assert after["timeline_dropped"] == 0


@pytest.mark.parametrize("usable", [{0}, {0, 1}], ids=["shared", "own"])
def test_ranks_agree_in_the_lane(monkeypatch: pytest.MonkeyPatch, usable: set[int]) -> None:
    """Also where they share a core, which a rank that waits there gives to the other."""

    def body(context: Context) -> float:
        with use(context):
            mine = np.ones(1)
            for _ in range(10_000):
                hvd.allreduce_(mine, name="x", op=hvd.Max)
                if hvd.metrics()["agreed_in_lane"] > 0:
                    break  # the other rank cannot be behind: it was in the same round
            return hvd.metrics()["agreed_in_lane"]

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: usable)
    assert [count > 0 for count in run_ranks(2, body)] == [True] * 2


def test_who_is_early_waits() -> None:
    def body(context: Context) -> float:
        with use(context):
            hvd.barrier()
            before = hvd.metrics()["wait_seconds"]
            if context.rank == 1:
                time.sleep(LATE)
            hvd.allreduce(np.ones(1), name="late")
            return hvd.metrics()["wait_seconds"] - before

    early, late = run_ranks(2, body)
    assert early > 0.8 * LATE > late


def test_sets_count_and_their_counts_stay() -> None:
    def body(context: Context) -> tuple[float, float]:
        with use(context):
            pair = hvd.add_process_set([0, 1])
            before = hvd.metrics()["bytes"]
            if pair.included():
                hvd.allreduce(np.ones(10, np.float64), name="inside", process_set=pair)
            within = hvd.metrics()["bytes"] - before
            hvd.remove_process_set(pair)
            return within, hvd.metrics()["bytes"] - before

    for rank, (within, after) in enumerate(run_ranks(3, body)):
        assert within == (80 if rank < 2 else 0)
        assert after >= within
