"""Failure of a Spark job: the rank that failed first, and its reason without Java's stack traces."""

import re
from collections.abc import Sequence

from farandole.errors import CacheError, FarandoleError, SourceError
from farandole.launch.failures import Failure, culprit

_BARRIER_TASK = re.compile(r"barrier task \w*Task\(\d+, (\d+)\)")
_JAVA_FRAME = re.compile(r"^\s+at [\w.$]+[(/]", re.MULTILINE)
_DEALING = re.compile(r"^[\w.]+\.(CacheError|SourceError|RowsLost): (?:cache )?(.+?): (.+)$", re.MULTILINE)
_CANCELLED = re.compile(r"Job \d+ (?:was )?cancelled\b[^\n]*")
_TRACEBACK = "Traceback (most recent call last):"


class JobCancelled(FarandoleError, RuntimeError):
    """Spark's job of the ranks was cancelled, for the reason that Spark gives."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the Spark job was cancelled, and its ranks have ended ({self.reason}); run it again"


def blame(failures: Sequence[Failure], spark_error: str, ranks_per_task: int = 1) -> Failure | None:
    """Choose the failure to raise, given the failures that ranks reported and the text of Spark's exception.

    If ranks reported at most that they lost another one, the first rank of a task that Spark names comes first: the
    task could not report, for example because its executor is lost. Returns None if Spark names no task either: the
    query before the ranks has failed, or the job was cancelled."""
    reported = culprit(failures) if failures else None
    if reported is not None and not reported.consequence:
        return reported
    task = _BARRIER_TASK.search(spark_error)
    if task is None:
        return None
    first = int(task.group(1)) * ranks_per_task
    ranks = range(first, first + ranks_per_task)
    # A rank whose executor is lost may still report, as others do, that it was ended.
    lost = not python_traceback(spark_error)
    if all(failure.rank not in ranks or (failure.consequence and lost) for failure in failures):
        return Failure(rank=first, reason=_reason(spark_error), code=1, traceback=python_traceback(spark_error))
    return reported


def dealing_error(spark_error: str) -> CacheError | SourceError | None:
    """Return the error of a task that deals rows, given the text of Spark's exception; None for other failures."""
    found = _DEALING.search(python_traceback(spark_error))
    if found is None:
        return None
    kind, place, problem = found.groups()
    return CacheError(place, problem) if kind == "CacheError" else SourceError(place, problem)


def cancellation(spark_error: str) -> JobCancelled | None:
    """Return the error of a job that was cancelled, given the text of Spark's exception; None for other failures."""
    found = _CANCELLED.search(spark_error)
    return None if found is None else JobCancelled(found[0].strip().rstrip("."))


def python_traceback(text: str) -> str:
    """Return the traceback of Python in the text of Spark's exception; "" if there is none."""
    start = text.find(_TRACEBACK)
    if start < 0:
        return ""
    text = text[start:]
    java = _JAVA_FRAME.search(text)
    return (text[: java.start()] if java else text).rstrip()


def _reason(text: str) -> str:
    traceback = python_traceback(text)
    if traceback:
        ends = [line for line in traceback.splitlines() if line and not line.startswith((" ", "SQLSTATE"))]
        return ends[-1]
    after = text.partition("finished unsuccessfully.")[2].strip()
    return after.splitlines()[0] if after else "its Spark task failed"
