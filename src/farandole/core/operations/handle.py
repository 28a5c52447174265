"""Handles of asynchronous operations."""

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from farandole import _native

R = TypeVar("R")


class Handle(Generic[R]):
    """Handle of an operation in flight, which keeps its tensors alive until it is done.

    `wait` can be called any number of times, from any thread; each call has the same result or error.
    """

    __slots__ = ("_finish", "_finishing", "_part", "_result")

    def __init__(
        self,
        part: "_native.Handle | Handle[Any] | None",
        result: R | None = None,
        finish: Callable[[], R] | None = None,
    ) -> None:
        """Make a handle of `part`, the engine's handle or another one; None if the operation is done already.

        The result is `result`, or the value that `finish` returns when `part` is done."""
        self._part = part
        self._result = result
        self._finish = finish
        # Reentrant, because a signal handler may wait for this handle while its thread is in `finish`.
        self._finishing = None if finish is None else threading.RLock()

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        part = self._part
        return part is None or part.done()

    def wait(self) -> R:
        """Return the result.

        Blocks until every rank has taken part; raises the operation's error, a `CollectiveError`. For a group it waits
        for all members even if one has failed, so that no buffer is written to afterwards.
        """
        part = self._part
        if part is not None:
            part.wait()
            if self._finishing is not None:
                with self._finishing:
                    finish = self._finish
                    if finish is not None:
                        made = finish()
                        if self._finish is not None:
                            self._result, self._finish = made, None
            self._part = None
        result: R = self._result  # type: ignore[assignment]  # the operation is done
        return result


def poll(handle: Handle[R]) -> bool:
    """Return whether `synchronize(handle)` would return at once."""
    if not isinstance(handle, Handle):
        raise _refused(handle)
    return handle.done()


def synchronize(handle: Handle[R]) -> R:
    """Return the result of the operation; later calls return it again.

    Blocks until every rank has taken part; raises `MismatchError`, `CollectiveTimeout` or `PeerLost`.
    """
    if not isinstance(handle, Handle):
        raise _refused(handle)
    return handle.wait()


def _refused(handle: object) -> TypeError:
    return TypeError(f"expected what an asynchronous operation returned, got {type(handle).__name__}")
