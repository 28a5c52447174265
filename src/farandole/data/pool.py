"""Daemon threads that read: a hanging read does not keep the process from ending."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

__all__ = ["ReadPool"]

A = TypeVar("A")
R = TypeVar("R")

# A thread that hangs in a far file system cannot be stopped; closing waits for it no longer than this.
_PATIENCE = 5.0


class ReadPool(Generic[A, R]):
    """Calls `act` on `threads` daemon threads, in the order of `submit`; close it to end them.

    The executor of the standard library would wait, at the latest when the interpreter ends, for a read that hangs.
    """

    def __init__(self, act: Callable[[A], R], threads: int) -> None:
        self._act = act
        self._asked: queue.SimpleQueue[tuple[A, Future[R]] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._counting = threading.Lock()
        self._unfinished = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"farandole-read-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, argument: A) -> "Future[R]":
        """Queue `act(argument)` and return its future at once."""
        future: Future[R] = Future()
        with self._counting:
            self._unfinished += 1
        self._asked.put((argument, future))
        return future

    @property
    def unfinished(self) -> int:
        """The number of calls that are queued or under way."""
        return self._unfinished

    def close(self) -> None:
        """End the threads, each after its current call. Calls that have not begun are cancelled."""
        self._closed.set()
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join(_PATIENCE)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            argument, future = asked
            if self._closed.is_set():
                future.cancel()
                continue
            try:
                future.set_result(self._act(argument))
            except BaseException as error:
                future.set_exception(error)  # raised where the result is asked for
            with self._counting:
                self._unfinished -= 1
