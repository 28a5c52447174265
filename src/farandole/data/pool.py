"""Pool of daemon threads that read, so that a hanging read does not keep the process from ending."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

__all__ = ["ReadPool"]

A = TypeVar("A")
R = TypeVar("R")

# Seconds that closing waits for each thread: one that hangs in a remote file system cannot be stopped.
_PATIENCE = 5.0


class ReadPool(Generic[A, R]):
    """Daemon threads that call `act`, in the order of `submit`; close the pool to end them.

    `threads` returns the number of threads, at least 1, that are useful now. The pool has no more: idle threads would
    slow the busy ones by more than a request costs.
    `concurrent.futures.ThreadPoolExecutor` is not used: it waits for a hanging read, at the latest when the interpreter
    exits.
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
        """The number of calls that are queued or running."""
        return self._unfinished

    def close(self) -> None:
        """End the threads, each after its current call, and cancel calls that have not begun.

        Waits up to `_PATIENCE` seconds for each thread."""
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
                future.set_exception(error)  # raised by `future.result()`
            with self._counting:
                self._unfinished -= 1
                if len(self._threads) > self._wanted() and not self._closed.is_set():
                    self._threads.remove(threading.current_thread())
                    return
                self._enlarge()

    def _enlarge(self) -> None:
        """Start a thread if there are more unfinished calls than threads, and one more thread is useful."""
        if len(self._threads) < min(self._unfinished, self._wanted()) and not self._closed.is_set():
            name = f"farandole-read-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()
