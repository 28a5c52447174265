"""Pool of daemon threads that read, so that a hanging read does not keep the process from ending."""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

__all__ = ["PATIENCE", "ReadPool"]

A = TypeVar("A")
R = TypeVar("R")

# Seconds that closing waits for threads: one that hangs in a remote file system cannot be stopped.
PATIENCE = 5.0


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
        self._unfinished: set[Future[R]] = set()
        self._threads: list[threading.Thread] = []

    def submit(self, argument: A) -> "Future[R]":
        """Queue `act(argument)` and return its future at once; after `cancel`, the future is cancelled."""
        future: Future[R] = Future()
        with self._counting:
            if self._closed.is_set():
                _end(future)
                return future
            self._unfinished.add(future)
            self._asked.put((argument, future))
            self._enlarge()
        return future

    @property
    def unfinished(self) -> int:
        """The number of calls that are queued or running."""
        return len(self._unfinished)

    def cancel(self) -> None:
        """Cancel all unfinished calls, so that nobody waits for them, and let each thread end after its current call.

        Returns at once."""
        with self._counting:
            self._closed.set()
            while self._unfinished:
                _end(self._unfinished.pop())
            for _ in self._threads:
                self._asked.put(None)

    def close(self) -> None:
        """Cancel all unfinished calls, and wait up to `PATIENCE` seconds in all for the threads to end."""
        self.cancel()
        self.join(PATIENCE)

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` in all for the threads of a cancelled pool to end."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            argument, future = asked
            if self._closed.is_set():
                continue
            try:
                result: R | BaseException = self._act(argument)
            except BaseException as error:
                result = error
            if not self._settle([(future, result)]):
                return

    def _settle(self, results: Iterable[tuple["Future[R]", R | BaseException]]) -> bool:
        """Give the futures their results or errors; return False if this thread must end, as others suffice."""
        with self._counting:
            if self._closed.is_set():
                return True  # the calls were cancelled meanwhile
            for future, result in results:
                if isinstance(result, BaseException):
                    future.set_exception(result)  # raised by `future.result()`
                else:
                    future.set_result(result)
                self._unfinished.remove(future)
            if len(self._threads) > self._wanted():
                self._threads.remove(threading.current_thread())
                return False
            self._enlarge()
        return True

    def _enlarge(self) -> None:
        """Start a thread if there are more unfinished calls than threads, and one more thread is useful."""
        if len(self._threads) < min(len(self._unfinished), self._wanted()) and not self._closed.is_set():
            name = f"farandole-read-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()


def _end(future: "Future[R]") -> None:
    """Cancel a future that no thread has settled, and tell those who wait for it."""
    future.cancel()
    future.set_running_or_notify_cancel()  # `concurrent.futures.wait` waits for this call
