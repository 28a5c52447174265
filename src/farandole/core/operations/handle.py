"""Handles of asynchronous operations."""

from collections.abc import Callable
from typing import Generic, TypeVar

from farandole import _native

__all__ = ["Handle", "poll", "synchronize"]

R = TypeVar("R")


class Handle(Generic[R]):
    """An operation under way; keeps its tensors alive until it is done.

    May be waited for any number of times, and by any thread: each gets the same result or the same error.
    """

    __slots__ = ("_finish", "_part", "_result")

    def __init__(
        self,
        part: _native.Handle | None,
        result: R | None = None,
        finish: Callable[[], R] | None = None,
    ) -> None:
        """Hold `result`, or the value that `finish` returns, until `part` is done; None is done already."""
        self._part = part
        self._result = result
        self._finish = finish

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        part = self._part
        return part is None or part.done()

    def wait(self) -> R:
        """Return the result.

        Blocks until every rank has taken part; raises what the operation failed with, as a `CollectiveError`. Of a
        group it waits for every member, also when one has failed: no buffer is still being written to then.
        """
        part = self._part
        if part is not None:
            part.wait()
            finish = self._finish
            if finish is not None:
                self._result = finish()
            self._part = self._finish = None
        result: R = self._result  # type: ignore[assignment]  # it is there now
        return result


def poll(handle: Handle[R]) -> bool:
    """Return whether `synchronize(handle)` would return at once."""
    if not isinstance(handle, Handle):
        raise _refused(handle)
    return handle.done()


def synchronize(handle: Handle[R]) -> R:
    """Return what the operation gave; a second call returns it again.

    Blocks until every rank has taken part; raises `MismatchError`, `CollectiveTimeout` or `PeerLost`.
    """
    if not isinstance(handle, Handle):
        raise _refused(handle)
    return handle.wait()


def _refused(handle: object) -> TypeError:
    return TypeError(f"expected what an asynchronous operation returned, got {type(handle).__name__}")
