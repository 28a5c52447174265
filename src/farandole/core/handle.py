"""What asynchronous operations return."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from farandole import _native

__all__ = ["Handle", "poll", "synchronize"]

R = TypeVar("R")


class Handle(Generic[R]):
    """An operation under way; keeps its tensors alive until it is done.

    May be waited for any number of times, and by any thread: each gets the same result or the same error.
    """

    __slots__ = ("_finish", "_parts", "_result")

    def __init__(self, parts: Sequence[_native.Handle], finish: Callable[[], R]) -> None:
        self._parts = parts
        self._finish: Callable[[], R] | None = finish
        self._result: R

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return all(part.done() for part in self._parts)

    def wait(self) -> R:
        """Return the result.

        Blocks until every rank has taken part; raises what the operation failed with, as a `CollectiveError`.
        """
        if self._finish is not None:
            wait_all(self._parts)
            finish = self._finish
            self._result = finish()
            self._finish = None
        return self._result


def wait_all(parts: Sequence[_native.Handle]) -> None:
    """Wait for every part, also when one of them fails, then raise the first failure.

    No buffer is still being written to when this returns or raises a `CollectiveError`.
    """
    failed: Exception | None = None
    for part in parts:
        try:
            part.wait()
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed


def poll(handle: Handle[R]) -> bool:
    """Return whether `synchronize(handle)` would return at once."""
    return _checked(handle).done()


def synchronize(handle: Handle[R]) -> R:
    """Return what the operation gave; a second call returns it again.

    Blocks until every rank has taken part; raises `MismatchError`, `CollectiveTimeout` or `PeerLost`.
    """
    return _checked(handle).wait()


def _checked(handle: Handle[R]) -> Handle[R]:
    if not isinstance(handle, Handle):
        raise TypeError(f"expected what an asynchronous operation returned, got {type(handle).__name__}")
    return handle
