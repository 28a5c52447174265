"""Tasks of several ranks on `local[2]`: each has its place, its rows, its value and its failure."""

import importlib.util
import os
import signal
import threading
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from farandole.data import FeedLoader, ShardSource
from farandole.errors import ConfigError, RankFailed, SlotsError
from farandole.spark import HorovodRunner, run
from helpers.marked import wait_until_gone
from helpers.spark_faults import dying_in_an_allreduce, restart_after_a_kill
from helpers.spark_session import last_job, tasks_of

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(180)]

needs_native = pytest.mark.skipif(importlib.util.find_spec("farandole._native") is None, reason="no native core")

HANGS = 100  # seconds


@needs_native
def test_ranks_of_two_tasks_average_and_read_each_row_once(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(dealt: ShardSource, arranged: ShardSource) -> tuple[int, int, int, float, list[list[int]]]:
        import numpy as np

        import farandole.numpy as hvd

        def rows(source: ShardSource) -> list[int]:
            made = FeedLoader(source, batch_size=64, policy="join", rank=0, size=1, gather=lambda mine: [mine])
            return sorted(int(number) for batch in made for number in batch["id"])

        hvd.init()
        print(f"heard from {hvd.rank()}")
        mean = float(hvd.allreduce(np.full(1000, float(hvd.rank())), name="x")[0])
        return hvd.rank(), hvd.local_rank(), os.getppid(), mean, [rows(dealt), rows(arranged)]

    arranged = spark.range(0, 1000, 1, 3).repartition(4, "id")
    expected = [sorted(row.id for row in arranged.where(f"spark_partition_id() = {k}").collect()) for k in range(4)]
    values = run(main, (spark.range(0, 1000, 1, 5), arranged), num_proc=4, ranks_per_task=2)
    assert [value[:2] for value in values] == [(rank, rank) for rank in range(4)]
    assert [value[3] for value in values] == [1.5] * 4
    assert sorted(number for value in values for number in value[4][0]) == list(range(1000))
    assert all(240 <= len(value[4][0]) <= 260 for value in values), "rows are dealt evenly"
    assert [value[4][1] for value in values] == expected
    shown = capsys.readouterr().out
    assert all(f"[{rank}] heard from {rank}" in shown for rank in range(4))
    assert len(tasks_of(spark, last_job(spark), count=2)) == 2


def test_all_slots_are_those_of_all_tasks(spark: SparkSession) -> None:
    assert run(lambda: os.environ["FARANDOLE_SIZE"], ranks_per_task=2, verbose=0) == ["4"] * 4
    with pytest.raises(SlotsError, match=r"6 ranks need 6 slots.* 1 core per task of 2 ranks\) has 4"):
        run(print, num_proc=6, ranks_per_task=2)
    with pytest.raises(ConfigError, match="ranks_per_task: must divide the number of ranks, 3, got 2"):
        HorovodRunner(np=3, ranks_per_task=2).run(print)


def test_a_killed_rank_ends_the_others_of_its_task(spark: SparkSession, mark: str) -> None:
    def main() -> None:
        if os.environ["FARANDOLE_RANK"] == "3":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(HANGS)

    with pytest.raises(RankFailed, match="rank 3 failed: was killed by SIGKILL") as caught:
        run(main, num_proc=4, ranks_per_task=2, env={"MARK": mark})
    assert caught.value.rank == 3
    assert wait_until_gone(mark, 20) == []
    tasks = tasks_of(spark, last_job(spark), count=2)
    assert (tasks[0]["status"], tasks[1]["status"]) == ("KILLED", "FAILED")
    assert "rank 3 failed" in str(tasks[1]["errorMessage"])


@needs_native
def test_the_guilty_rank_is_named_beside_those_that_lost_it(spark: SparkSession, mark: str) -> None:
    main = dying_in_an_allreduce(1, error=KeyError("the column that is not there"))
    with pytest.raises(RankFailed, match="the column that is not there") as caught:
        run(main, num_proc=4, ranks_per_task=2, env={"MARK": mark})
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert wait_until_gone(mark, 20) == []


def test_all_ranks_start_again_when_one_was_killed(spark: SparkSession, tmp_path: Path, mark: str) -> None:
    restart_after_a_kill(spark, tmp_path, mark, killed=2, num_proc=4, ranks_per_task=2)
