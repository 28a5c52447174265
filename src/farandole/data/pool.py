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
    """Calls `act` on daemon threads, in the order of `submit`; close it to end them.

    `threads` returns how many threads, 1 or more, are of use now. There are no more than that: threads that wait for
    their turn would cost those at work more than a request does.
    The executor of the standard library would wait, at the latest when the interpreter ends, for a read that hangs.
    """

    def __init__(self, act: Callable[[A], R], threads: Callable[[], int]) -> None:
        self._act, self._wanted = act, threads
        self._asked: queue.SimpleQueue[tuple[A, Future[R]] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._counting = threading.Lock()
        self._unfinished = 0
        self._threads: list[threading.Thread] = []

    def submit(self, argument: A) -> "Future[R]":
        """Queue `act(argument)` and return its future at once."""
        future: Future[R] = Future()
        with self._counting:
            self._unfinished += 1
            self._asked.put((argument, future))
            self._enlarge()
        return future

    @property
    def unfinished(self) -> int:
        """The number of calls that are queued or under way."""
        return self._unfinished

    def close(self) -> None:
        """End the threads, each after its current call. Calls that have not begun are cancelled."""
        with self._counting:
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
                if len(self._threads) > self._wanted() and not self._closed.is_set():
                    self._threads.remove(threading.current_thread())
                    return
                self._enlarge()

    def _enlarge(self) -> None:
        """Start a thread if that many calls are unfinished, and it is of use."""
        if len(self._threads) < min(self._unfinished, self._wanted()) and not self._closed.is_set():
            name = f"farandole-read-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()
