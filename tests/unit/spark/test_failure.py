"""The failure that the driver shows is the first one, whoever reported it."""

import pickle
import threading

import pytest

pytest.importorskip("pyspark")

from farandole.errors import CacheError, ConfigError, PeerLost, SourceError
from farandole.launch.failures import Failure, from_payload, to_payload
from farandole.spark.jobs.failure import JobCancelled, blame, cancellation, dealing_error
from farandole.spark.jobs.gpus import divide, visible_gpus

SPARKS_WORDS = """Job aborted due to stage failure: Could not recover from a failed barrier ResultStage. Most recent \
failure reason: Stage failed because barrier task ResultTask(1, 3) finished unsuccessfully.
org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] Traceback (most recent call last):
  File "worker.py", line 1, in main
    import farandole
ModuleNotFoundError: No module named 'farandole'
 SQLSTATE: 38000
\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:1097)
\tat org.apache.spark.sql.execution.python.PythonArrowOutput$$anon$1.read(PythonArrowOutput.scala:145)
"""
EXECUTOR_LOST = """Stage failed because barrier task ResultTask(0, 1) finished unsuccessfully.
ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: Command exited with code 137"""


def failed(rank: int, *, at: float, consequence: bool = False) -> Failure:
    return Failure(rank=rank, reason="KeyError: 'x'", code=1, at=at, consequence=consequence)


def test_a_consequence_is_not_to_blame_even_when_it_comes_first() -> None:
    guilty = blame([failed(0, at=1, consequence=True), failed(2, at=2), failed(1, at=3)], SPARKS_WORDS)
    assert guilty is not None
    assert guilty.rank == 2


def test_a_rank_that_could_not_report_is_named_by_spark() -> None:
    guilty = blame([failed(0, at=1, consequence=True)], EXECUTOR_LOST)
    assert guilty is not None
    assert guilty.rank == 1
    assert guilty.reason.startswith("ExecutorLostFailure")


def test_a_lost_executor_comes_before_the_end_of_its_rank() -> None:
    guilty = blame([failed(0, at=1, consequence=True), failed(1, at=2, consequence=True)], EXECUTOR_LOST)
    assert guilty is not None
    assert (guilty.rank, guilty.reason[:19]) == (1, "ExecutorLostFailure")


def test_a_lost_executor_of_several_ranks_is_blamed_on_the_first_of_them() -> None:
    lost_them = [failed(rank, at=rank, consequence=True) for rank in range(4)]
    guilty = blame(lost_them, EXECUTOR_LOST, ranks_per_task=4)
    assert guilty is not None
    assert (guilty.rank, guilty.reason[:19]) == (4, "ExecutorLostFailure")


def test_a_task_that_has_reported_its_failure_is_not_blamed_for_another() -> None:
    own = [failed(rank, at=rank, consequence=True) for rank in range(6, 8)]
    guilty = blame(own, SPARKS_WORDS, ranks_per_task=2)  # which name partition 3
    assert guilty is not None
    assert (guilty.rank, guilty.reason) == (6, "KeyError: 'x'")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("farandole.errors.CacheError: cache /disk: cannot hold rows ([Errno 28] No: space)", CacheError),
        ("farandole.spark.rows.exchange.access.RowsLost: rows kept at 10.0.0.1:7: are gone", SourceError),
        ("ValueError: x: y", type(None)),
    ],
)
def test_a_task_that_could_not_deal_rows_is_our_error(said: str, expected: type) -> None:
    found = dealing_error(SPARKS_WORDS.replace("ModuleNotFoundError: No module named 'farandole'", said))
    assert type(found) is expected
    assert found is None or said.endswith(str(found))


def test_a_task_that_failed_before_its_rank_shows_its_traceback_without_java() -> None:
    guilty = blame([], SPARKS_WORDS)
    assert guilty is not None
    assert (guilty.rank, guilty.reason) == (3, "ModuleNotFoundError: No module named 'farandole'")
    assert guilty.traceback.startswith("Traceback")
    assert "scala" not in guilty.traceback


def test_without_any_better_a_consequence_is_shown() -> None:
    guilty = blame([failed(3, at=1, consequence=True)], SPARKS_WORDS)
    assert guilty is not None
    assert guilty.rank == 3


def test_a_failing_query_is_nobodys_fault() -> None:
    assert blame([], "[DIVIDE_BY_ZERO] Division by zero") is None


def test_ranks_that_a_cancelled_job_ended_are_not_to_blame() -> None:
    assert blame([failed(0, at=1, consequence=True)], "[SPARK_JOB_CANCELLED] Job 3 cancelled") is None


def test_a_failure_travels_with_its_exception() -> None:
    cause = PeerLost("grad", 1, "connection reset")
    sent = Failure(
        rank=2, reason="PeerLost", code=1, at=5.0, consequence=True, traceback="Traceback ...", tail=("a", "b"),
        cause=cause,
    )  # fmt: skip
    got = from_payload(2, to_payload(sent), at=7.0)
    assert (got.rank, got.reason, got.code, got.at, got.consequence) == (2, "PeerLost", 1, 7.0, True)
    assert (got.traceback, got.tail) == ("Traceback ...", ("a", "b"))
    assert isinstance(got.cause, PeerLost)
    assert got.cause.rank == 1


def test_an_exception_that_cannot_travel_leaves_its_text() -> None:
    class Unpicklable(Exception):
        lock = threading.Lock()  # no class with one can be pickled

    sent = Failure(rank=0, reason="Unpicklable: it", code=1, cause=Unpicklable("it"))
    got = from_payload(0, to_payload(sent), at=0.0)
    assert (got.cause, got.reason) == (None, "Unpicklable: it")
    assert "Unpicklable cannot be pickled" in got.no_cause


@pytest.mark.parametrize(
    ("by_local_rank", "visible"),
    [
        ([["0"], ["1"]], "0,1"),
        ([["3"], ["1"], ["2"]], "3,1,2"),
        ([["0", "1"], ["2", "3"]], "0,2,1,3"),
        ([[], []], ""),
    ],
)
def test_local_rank_finds_its_own_gpu_at_its_own_index(by_local_rank: list[object], visible: str) -> None:
    assert visible_gpus(by_local_rank) == visible


def test_ranks_of_a_task_divide_its_gpus() -> None:
    assert divide(["4", "5", "6", "7"], 2) == [["4", "5"], ["6", "7"]]
    assert divide(["4", "5"], 2) == [["4"], ["5"]]
    assert divide([], 2) == [[], []]
    with pytest.raises(ConfigError, match="ranks_per_task: is 2, but tasks have 3 GPUs"):
        divide(["4", "5", "6"], 2)


def test_a_cancelled_job_is_no_failure_of_a_rank() -> None:
    text = "An error occurred while calling o81.\n: org.apache.spark.SparkException: Job 3 cancelled because of x\n\tat"
    error = cancellation(text)
    assert isinstance(error, JobCancelled) and isinstance(pickle.loads(pickle.dumps(error)), JobCancelled)
    assert str(error).endswith("its ranks have ended (Job 3 cancelled because of x); run it again")
    assert cancellation("java.lang.OutOfMemoryError") is None
