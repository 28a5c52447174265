"""Attempts of a run: which failures are worth another one, and where the limit is."""

import errno
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("pyspark")

from farandole.errors import DataError, RankFailed, SourceError
from farandole.launch.failures import Failure
from farandole.spark.jobs.attempts import Attempts
from farandole.spark.rows.exchange.access import RowsLost


def raised(reason: str, cause: BaseException | None = None) -> Failure:
    return Failure(rank=1, reason=reason, code=1, cause=cause)


KILLED = Failure(rank=1, reason="was killed", code=137, killed=True)


def test_a_killed_rank_is_started_again_up_to_the_limit() -> None:
    attempts = Attempts(3, dealings=4)
    assert attempts.begin(1, None)
    assert attempts.go_on(KILLED)
    assert attempts.begin(2, KILLED)
    assert attempts.go_on(KILLED)
    assert attempts.begin(3, KILLED)
    assert not attempts.go_on(KILLED)
    assert attempts.earlier == ["rank 1 failed: was killed"] * 2


def test_an_attempt_beyond_the_limit_is_refused() -> None:
    attempts = Attempts(1, dealings=4)
    assert attempts.begin(1, None)
    assert not attempts.begin(2, KILLED)
    assert attempts.refused is KILLED
    assert attempts.earlier == []


def test_an_attempt_that_spark_begins_after_the_last_failure_is_refused() -> None:
    """A Spark Connect server is told later to cancel the job."""
    wrong = raised("1 of 3 rows are null", DataError("x", "1 of 3 rows are null"))
    attempts = Attempts(4, dealings=4)
    attempts.begin(1, None)
    assert not attempts.go_on(wrong)
    assert not attempts.begin(2, wrong)
    assert attempts.refused is wrong
    assert attempts.earlier == []
    attempts = Attempts(4, dealings=4)
    attempts.begin(1, None)
    assert not attempts.go_on(raised("the other side has closed the connection"))
    assert attempts.begin(2, KILLED), "the kill explains the exception"


def test_an_exception_ends_the_run_unless_the_attempt_got_further_than_those_before() -> None:
    attempts = Attempts(9, dealings=4)
    tell = attempts.watching(None)
    attempts.begin(1, None)
    assert not attempts.go_on(raised("no such loss"))
    for epoch in (1, 2):
        tell(0, {"kind": "epoch", "epoch": epoch})
    assert attempts.go_on(raised("no such loss"))
    attempts.begin(2, raised("no such loss"))
    for epoch in (1, 2):  # a fit without a store begins anew
        tell(0, {"kind": "epoch", "epoch": epoch})
    assert not attempts.go_on(raised("no such loss"))
    tell(0, {"kind": "epoch", "step": 300})
    assert attempts.go_on(raised("no such loss"))


@pytest.mark.parametrize(
    "failure",
    [
        raised("was reset", ConnectionResetError()),
        raised("was late", TimeoutError()),
        Failure(rank=1, reason="was killed by SIGABRT", code=134),
        Failure(rank=1, reason="rank 0 is lost", code=1, consequence=True),
    ],
)
def test_what_may_pass_is_tried_up_to_the_limit(failure: Failure) -> None:
    attempts = Attempts(2, dealings=4)
    attempts.begin(1, None)
    assert attempts.go_on(failure)
    attempts.begin(2, failure)
    assert not attempts.go_on(failure)


def test_a_kill_that_is_known_later_explains_an_exception() -> None:
    attempts = Attempts(4, dealings=4)
    attempts.begin(1, None)
    assert not attempts.go_on(raised("the other side has closed the connection"))
    assert attempts.go_on(KILLED)
    assert attempts.run(jobs(attempts, (1, FAILED), (1, None))) == "done"


def test_rows_that_cannot_be_used_end_the_run() -> None:
    attempts = Attempts(4, dealings=4)
    attempts.begin(1, None)
    attempts.progress(1)
    for lasting in (DataError("x", "is null"), OSError(errno.ENOSPC, "No space left on device")):
        assert not attempts.go_on(raised("lasts", lasting))


def jobs(attempts: Attempts, *stages: tuple[int, Exception | None]) -> Callable[[], str]:
    """Return Spark jobs, each with so many attempts of its stage, and the error that ends it."""
    left: Iterator[tuple[int, Exception | None]] = iter(stages)

    def job() -> str:
        number, error = next(left)
        for stage_attempt in range(1, number + 1):
            assert attempts.begin(stage_attempt, KILLED if stage_attempt > 1 else None)
        if error is not None:
            raise error
        return "done"

    return job


FAILED, LOST = RankFailed(1, "was killed"), RowsLost("the rows kept on a", "are gone")


def test_another_spark_job_takes_the_attempts_that_are_left() -> None:
    attempts = Attempts(5, dealings=4)
    assert attempts.run(jobs(attempts, (2, FAILED), (2, LOST), (2, None))) == "done"
    assert attempts.earlier == ["rank 1 failed: was killed"] * 4, "the one without rows does not count"


@pytest.mark.parametrize(
    ("most", "stages", "error"),
    [
        (2, [(2, FAILED)], RankFailed),
        (4, [(0, FAILED)], RankFailed),  # no task has reached the driver
        (1, [(0, LOST), (1, LOST), (0, LOST)], SourceError),
    ],
)
def test_the_end_of_a_run(most: int, stages: list[tuple[int, Exception]], error: type[Exception]) -> None:
    attempts = Attempts(most, dealings=3)
    with pytest.raises(error):
        attempts.run(jobs(attempts, *stages))
