"""Horovod's sentences in front of farandole's errors, and its names in timelines, for programs that look for them."""

from collections.abc import Callable
from typing import TypeAlias

from farandole.errors import (
    EngineClosed,
    FarandoleError,
    InvalidRequest,
    MismatchError,
    NotInitializedError,
    PeerLost,
    RankFailed,
)
from farandole.timeline.names import Spelling, as_horovod

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution."
)
EXITED = (
    "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated. "
    "The first process to do so was:\nProcess name: {rank}\n"
)
SAME_NAME = "Requested to {operation} a tensor with the same name as another tensor that is currently being processed."

# By the part that differs. {a} and {b} are the requests of two ranks, {OPERATION} is ALLREDUCE or another operation.
MISMATCHES = {
    "operation": "Mismatched operations: One rank did an {a}, but another rank did an {b}.",
    "dtype": "Mismatched data types: One rank had type {a}, but another rank had type {b}.",
    "shape": "Mismatched {OPERATION} tensor shapes: One rank sent a tensor of shape {a}, "
    "but another rank sent a tensor of shape {b}.",
    "device": "Mismatched {OPERATION} CPU/GPU device selection: One rank specified device {a}, "
    "but another rank specified device {b}.",
    "reduce op": "Mismatched reduction operation: One rank asked for {a}, but another rank asked for {b}.",
    "scale factors": "Mismatched prescale and/or postscale factors: One rank had {a}, but another rank had {b}.",
    "root rank": "Mismatched {OPERATION} root ranks: One rank specified {a}, but another rank specified {b}.",
}

Text: TypeAlias = Callable[[FarandoleError], str]

_KINDS = (EngineClosed, InvalidRequest, MismatchError, NotInitializedError, PeerLost, RankFailed)


def horovods_sentence(error: FarandoleError) -> str:
    """Return Horovod's sentence for `error`, or "" if programs look for none."""
    if isinstance(error, NotInitializedError):
        return NOT_INITIALIZED
    if isinstance(error, (EngineClosed, PeerLost)):
        return SHUT_DOWN
    if isinstance(error, RankFailed):
        return EXITED.format(rank=error.rank)
    if isinstance(error, MismatchError):
        parts = dict.fromkeys(_part(error.asked[rank], error.what) for rank in sorted(error.asked))
        if error.what in MISMATCHES and len(parts) > 1:
            a, b, *_ = parts
            return MISMATCHES[error.what].format(a=a, b=b, OPERATION=_operation(error.name).upper())
    if isinstance(error, InvalidRequest) and "operation of the same name" in error.problem:
        return SAME_NAME.format(operation=_operation(error.name))
    return ""


class Speech:
    """Patch that puts Horovod's sentences in front of the errors' texts, and its names of events into timelines.

    It lasts from construction until `end`. It patches the errors' classes, because errors are raised in many places,
    also in the native core and within autograd."""

    def __init__(self) -> None:
        kinds: tuple[type[FarandoleError], ...] = _KINDS
        self._before: dict[type[FarandoleError], Text] = {kind: kind.__str__ for kind in kinds}
        for kind, ours in self._before.items():
            kind.__str__ = _with_sentence(ours)  # type: ignore[method-assign, assignment]
        self._spelling = Spelling.of_events
        Spelling.of_events = as_horovod

    def end(self) -> None:
        """Restore the errors' own texts and the own names of events."""
        Spelling.of_events = self._spelling
        for kind, ours in self._before.items():
            kind.__str__ = ours  # type: ignore[method-assign, assignment]


def _with_sentence(ours: Text) -> Text:
    """Return a function that puts Horovod's sentence in front of an error's own text, which `ours` returns."""

    def text(error: FarandoleError) -> str:
        sentence = horovods_sentence(error)
        if isinstance(error, NotInitializedError):
            return sentence  # farandole's own text says the same
        return f"{sentence}{' ' if sentence and not sentence.endswith(chr(10)) else ''}{ours(error)}"

    return text


def _operation(name: str) -> str:
    """Return the operation of a wire name: "allreduce" for "grouped_allreduce.fc.weight_1of2"."""
    return name.partition(".")[0].removeprefix("grouped_")


def _part(request: str, what: str) -> str:
    """Return the device of a request such as "CUDA tensor", the dtype or the shape of "float32[2, 3]"."""
    if what == "device":
        return "GPU" if request == "CUDA tensor" else "CPU"
    dtype, bracket, shape = request.partition("[")
    if what == "dtype":
        return dtype
    return f"{bracket}{shape}" if what == "shape" else request
