"""Which rank failed first, and how to say so without two hundred lines of Java."""

import base64
import pickle
import re
from collections.abc import Mapping, Sequence

import cloudpickle

from farandole.errors import CacheError, SourceError
from farandole.launch.failures import Failure, culprit

__all__ = ["blame", "dealing_error", "from_payload", "to_payload"]

LONGEST_TEXT = 1 << 18  # characters; the end of a traceback is what matters
LARGEST_EXCEPTION = 1 << 20  # bytes; an exception that drags a data set along travels as its text only

_BARRIER_TASK = re.compile(r"barrier task \w*Task\(\d+, (\d+)\)")
_JAVA_FRAME = re.compile(r"^\s+at [\w.$]+[(/]", re.MULTILINE)
_DEALING = re.compile(r"^[\w.]+\.(CacheError|SourceError|RowsLost): (?:cache )?(.+?): (.+)$", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"


def to_payload(failure: Failure) -> dict[str, object]:
    """Write a rank's failure as plain values, its exception among them where it can travel."""
    pickled = _dump(failure.cause)
    return {
        "reason": failure.reason[:LONGEST_TEXT],
        "code": failure.code,
        "killed": failure.killed,
        "consequence": failure.consequence,
        "traceback": failure.traceback[-LONGEST_TEXT:],
        "tail": list(failure.tail),
        "exception": base64.b64encode(pickled).decode() if pickled else "",
    }


def from_payload(rank: int, payload: Mapping[str, object], at: float) -> Failure:
    """Read what `to_payload` wrote; `at` is the reader's own time, clocks of two hosts have nothing in common.

    The exception is unpickled: only for payloads from a task that has proved the job's secret."""
    tail, code, pickled = payload["tail"], payload["code"], payload["exception"]
    assert isinstance(tail, list) and isinstance(code, int) and isinstance(pickled, str), payload
    return Failure(
        rank=rank,
        reason=str(payload["reason"]),
        code=code,
        at=at,
        killed=bool(payload["killed"]),
        consequence=bool(payload["consequence"]),
        traceback=str(payload["traceback"]),
        tail=tuple(str(line) for line in tail),
        cause=_load(base64.b64decode(pickled)) if pickled else None,
    )


def blame(failures: Sequence[Failure], spark_error: str) -> Failure | None:
    """Choose the failure to raise, given what the ranks reported and the text of Spark's exception.

    A rank that Spark names and that could not report (its executor is gone) comes before ranks that only lost it.
    None when Spark names no rank: the query before them has failed, or the job was cancelled."""
    reported = culprit(failures) if failures else None
    if reported is not None and not reported.consequence:
        return reported
    task = _BARRIER_TASK.search(spark_error)
    if task is None:
        return None
    rank = int(task.group(1))
    if all(failure.rank != rank for failure in failures):
        return Failure(rank=rank, reason=_reason(spark_error), code=1, traceback=_python_traceback(spark_error))
    return reported


def dealing_error(spark_error: str) -> CacheError | SourceError | None:
    """Return the error of a task that deals rows, given the text of Spark's exception; None for any other failure."""
    found = _DEALING.search(_python_traceback(spark_error))
    if found is None:
        return None
    kind, place, problem = found.groups()
    return CacheError(place, problem) if kind == "CacheError" else SourceError(place, problem)


def _dump(error: BaseException | None) -> bytes:
    if error is None:
        return b""
    try:
        pickled: bytes = cloudpickle.dumps(error)
    except Exception:
        return b""  # any class of user code may refuse; text and traceback travel anyway
    return pickled if len(pickled) <= LARGEST_EXCEPTION else b""


def _load(pickled: bytes) -> BaseException | None:
    try:
        error = pickle.loads(pickled)
    except Exception:
        return None  # its class may live in a module that only the executors have; the text says what it was
    return error if isinstance(error, BaseException) else None


def _python_traceback(text: str) -> str:
    start = text.find(_TRACEBACK)
    if start < 0:
        return ""
    text = text[start:]
    java = _JAVA_FRAME.search(text)
    return (text[: java.start()] if java else text).rstrip()


def _reason(text: str) -> str:
    traceback = _python_traceback(text)
    if traceback:
        ends = [line for line in traceback.splitlines() if line and not line.startswith((" ", "SQLSTATE"))]
        return ends[-1]
    after = text.partition("finished unsuccessfully.")[2].strip()
    return after.splitlines()[0] if after else "its Spark task failed"
