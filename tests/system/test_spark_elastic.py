"""Elastic ranks in the tasks of an ordinary Spark job on a local master."""

import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from farandole.errors import ConfigError, RankFailed, SlotsTimeout
from farandole.spark import JobCancelled, log_to_driver, run_elastic
from helpers.marked import wait_until_gone
from helpers.spark_elastic import expected_weight, place_of, training
from helpers.spark_session import local_session

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_session() as started:
        yield started


def meanwhile(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


@pytest.mark.usefixtures("spark")
def test_a_killed_rank_is_replaced_and_every_step_counts_once(tmp_path: Path) -> None:
    def kill_one() -> None:
        try:
            victim = place_of(tmp_path, rank=1, size=2)
            os.kill(victim.pid, signal.SIGKILL)
            place_of(tmp_path, rank=1, size=2, not_pid=victim.pid)
        finally:
            (tmp_path / "end").touch()

    killer, shown = meanwhile(kill_one), io.StringIO()
    # A third rank waits for a slot that this master does not have.
    values = run_elastic(training, [str(tmp_path)], num_proc=2, min_num_proc=1, max_num_proc=3, stdout=shown)
    killer.join()
    assert len(values) == 2
    assert values[0][:2] == values[1][:2] == (values[0][0], expected_weight(values[0][0]))
    assert sorted(value[2] for value in values) == ["0", "1"], "local ranks"
    assert shown.getvalue().count("the training is over\n") == 2


@pytest.mark.usefixtures("spark")
def test_the_exception_of_a_rank_is_raised(mark: str) -> None:
    def fail(name: str) -> None:
        log_to_driver("looks up")
        raise LookupError(name)

    shown = io.StringIO()
    with pytest.raises(RankFailed, match="no such column") as caught:
        run_elastic(fail, kwargs={"name": "no such column"}, num_proc=1, env={"MARK": mark}, stdout=shown, verbose=0)
    assert isinstance(caught.value.__cause__, LookupError)
    assert shown.getvalue() == "[0] looks up\n"
    assert wait_until_gone(mark, 20) == []


@pytest.mark.parametrize("how", ["ctrl-c", "cancel"])
def test_an_ended_job_leaves_no_rank(spark: SparkSession, tmp_path: Path, mark: str, how: str) -> None:
    def end() -> None:
        try:
            place_of(tmp_path, rank=1, size=2)
            if how == "cancel":
                spark.sparkContext.cancelAllJobs()
            else:
                os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            (tmp_path / "end").touch()
            raise

    ender = meanwhile(end)
    with pytest.raises(KeyboardInterrupt if how == "ctrl-c" else JobCancelled):
        run_elastic(training, [str(tmp_path)], num_proc=2, min_num_proc=1, env={"MARK": mark}, verbose=0)
    ender.join()
    assert wait_until_gone(mark, 20) == []
    assert spark.sparkContext.statusTracker().getActiveJobsIds() == []
    assert [each.name for each in threading.enumerate() if each.name.startswith("farandole")] == []


def test_what_cannot_begin_is_refused(spark: SparkSession) -> None:
    before = time.monotonic()
    with pytest.raises(SlotsTimeout, match=r"3 ranks need 3 slots, but Spark \(local\[2\]\) after 2 s has [0-2]"):
        run_elastic(print, num_proc=3, start_timeout=2)
    assert time.monotonic() - before < 30
    with pytest.raises(ConfigError, match="must lie between min_np 2"):
        run_elastic(print, num_proc=1, min_num_proc=2)
    with pytest.raises(ConfigError, match="has a DataFrame"):
        run_elastic(print, [spark.range(2)], num_proc=1)
