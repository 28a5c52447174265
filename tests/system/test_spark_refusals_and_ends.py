"""Jobs of ranks on Spark: wrong arguments are refused, ranks' errors arrive, and a user's job group cancels them."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark import InheritableThread
from pyspark.sql import SparkSession

import farandole
from farandole.errors import ConfigError, RankFailed
from farandole.estimators.backend import SparkBackend
from farandole.spark import JobCancelled, run, run_elastic
from farandole.spark.driver.messages import send
from farandole.spark.jobs.barrier import run_barrier_job
from helpers.marked import processes_with, wait_until_gone

pytestmark = [pytest.mark.spark, pytest.mark.timeout(120)]

HANGS = 60  # seconds: a rank that nobody ends


def test_a_users_job_group_cancels_the_ranks(spark: SparkSession, mark: str) -> None:
    context, ends = spark.sparkContext, list[BaseException]()

    def main() -> None:
        send("started", {})
        threading.Event().wait(HANGS)

    def cancel(rank: int, message: dict[str, object]) -> None:
        context.cancelJobGroup("cell 7")

    def of_a_cell() -> None:
        context.setJobGroup("cell 7", "of a notebook")
        with pytest.raises(JobCancelled) as caught:
            run_barrier_job(spark, main, num_proc=1, description="none", env={"MARK": mark}, on_message=cancel)
        ends.append(caught.value)
        assert context.getLocalProperty("spark.jobGroup.id") == "cell 7"
        assert context.getLocalProperty("spark.job.description") == "of a notebook"
        assert not context.getJobTags()

    thread = InheritableThread(target=of_a_cell)
    thread.start()
    thread.join()
    assert len(ends) == 1
    assert wait_until_gone(mark, 20) == []


def test_an_error_with_bytes_that_are_no_text_reaches_the_driver(spark: SparkSession) -> None:
    def main() -> None:
        raise FileNotFoundError(f"/nowhere/{os.fsdecode(name)}")

    name = b"gar\xe7on.csv"  # of a folder from an old system

    with pytest.raises(RankFailed, match=r"FileNotFoundError: /nowhere/gar.udce7on\.csv") as caught:
        run(main, num_proc=2)
    str(caught.value).encode()
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize("env", [{"A": 1}, {"A": None}, {1: "A"}, {"": "A"}, {"A=B": "C"}, {"A": "\0"}])
def test_variables_that_no_process_can_have_are_refused_at_once(spark: SparkSession, env: dict[str, str]) -> None:
    for start in (run, run_elastic, farandole.run):
        with pytest.raises(ConfigError, match=r"^env: (variables are texts|no process can have)"):
            start(print, num_proc=2, env=env)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "soon"])
def test_a_time_that_is_none_is_refused_at_once(spark: SparkSession, seconds: float, mark: str) -> None:
    with pytest.raises(ConfigError, match=r"^start_timeout: "):
        run(print, num_proc=1, start_timeout=seconds, env={"MARK": mark})
    with pytest.raises(ConfigError, match=r"^start_timeout: "):
        SparkBackend(1, start_timeout=seconds).tasks()
    assert processes_with(mark) == []


def test_the_time_to_start_may_be_a_variable_of_the_ranks(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="FARANDOLE_START_TIMEOUT"):
        run(print, num_proc=1, env={"FARANDOLE_START_TIMEOUT": "soon"})
    with pytest.raises(RankFailed, match=r"0\.001"):
        run(print, num_proc=1, env={"FARANDOLE_START_TIMEOUT": "1ms"})


def test_the_end_of_the_session_cancels_the_ranks(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session only looks stopped, because the modules of this process share it."""
    ends = list[BaseException]()

    def stop(rank: int, message: dict[str, object]) -> None:
        monkeypatch.setattr(spark.sparkContext, "_jsc", None)

    def start() -> None:
        with pytest.raises(JobCancelled, match="its Spark session was stopped") as caught:
            run_barrier_job(spark, lambda: send("started", {}), num_proc=1, description="none", on_message=stop)
        ends.append(caught.value)

    thread = InheritableThread(target=start)
    thread.start()
    thread.join()
    assert len(ends) == 1


def test_rows_of_a_stopped_session_are_refused(spark: SparkSession) -> None:
    rows: Any = SimpleNamespace(sparkSession=SimpleNamespace(sparkContext=SimpleNamespace(_jsc=None)))
    with pytest.raises(ConfigError, match="spark: the session has been stopped"):
        run_barrier_job(spark, print, num_proc=1, dataframe=rows, description="none")
