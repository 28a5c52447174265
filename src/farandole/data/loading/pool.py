"""Pool of daemon threads that read, so that a hanging read does not keep the process from ending."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")

# Seconds that closing waits for threads: one that hangs in a remote file system cannot be stopped.
PATIENCE = 5.0
# Bytes of the results of a run, and its greatest length. Larger results come one by one; for small ones, handing over
# takes as long as reading.
RUN_BYTES, _RUN_LENGTH = 1 << 20, 64


def attempt(act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | BaseException:
    """Return the result of a call, or its error."""
    try:
        return act(*args, **kwargs)
    except BaseException as error:
        return error


class Pending(Generic[R]):
    """A result of a pool, or an error, that comes; `ReadPool.wait` waits for it.

    A future of the standard library consists of seven objects, which make Python's garbage collector run more often."""

    __slots__ = ("_outcome", "done")

    def __init__(self) -> None:
        self.done = False
        self._outcome: R | BaseException

    @property
    def failed(self) -> bool:
        """True if an error has come."""
        return self.done and isinstance(self._outcome, BaseException)

    def settle(self, outcome: R | BaseException) -> None:
        """Give the result, or the error that `result` is to raise; only the pool calls this."""
        self._outcome = outcome
        self.done = True

    def result(self) -> R:
        """Return the result, which must have come, or raise the error."""
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


class ReadPool(Generic[A, R]):
    """Daemon threads that act on arguments, in the order of `submit`; close the pool to end them.

    `act` gets a run of arguments, and yields a result or an error for each. A run is as long as its results, of which
    `weigh` estimates the bytes, are smaller than `RUN_BYTES`, but no longer than 64 or a thread's share of what is
    queued.
    `threads` returns the number of threads, at least 1, that are useful now. The pool has no more: idle threads would
    slow the busy ones by more than a request costs.
    `concurrent.futures.ThreadPoolExecutor` is not used: it waits for a hanging read, at the latest when the interpreter
    exits.
    """

    def __init__(
        self,
        act: Callable[[Sequence[A]], Iterable[R | BaseException]],
        threads: Callable[[], int],
        weigh: Callable[[A], int],
    ) -> None:
        self._act, self._wanted, self._weigh = act, threads, weigh
        self._asked: queue.SimpleQueue[tuple[A, Pending[R]] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._changed = threading.Condition(threading.Lock())
        self._unfinished: set[Pending[R]] = set()
        self._awaited: set[Pending[R]] = set()
        self._threads: list[threading.Thread] = []

    def submit(self, argument: A) -> Pending[R]:
        """Queue an argument and return its pending result at once; after `cancel`, this is `CancelledError`."""
        pending: Pending[R] = Pending()
        with self._changed:
            if self._closed.is_set():
                pending.settle(CancelledError())
                return pending
            self._unfinished.add(pending)
            self._asked.put((argument, pending))
            self._enlarge()
        return pending

    def wait(self, pending: Sequence[Pending[R]], timeout: float) -> bool:
        """Block until these have come, or `timeout` seconds have passed; return whether they have come.

        Raises the error of the first that failed, even if others have not come. Only one thread may wait at a time."""
        with self._changed:
            if not any(each.failed for each in pending):
                self._awaited = {each for each in pending if not each.done}
                self._changed.wait_for(lambda: not self._awaited, timeout)
        for each in pending:
            if each.done:
                each.result()
        return all(each.done for each in pending)

    @property
    def unfinished(self) -> int:
        """The number of arguments whose results have not come."""
        return len(self._unfinished)

    def cancel(self) -> None:
        """Cancel all unfinished results, so that nobody waits, and let each thread end after its current argument.

        Returns at once."""
        with self._changed:
            self._closed.set()
            while self._unfinished:
                self._unfinished.pop().settle(CancelledError())
            self._awaited.clear()
            self._changed.notify_all()
            for _ in self._threads:
                self._asked.put(None)

    def close(self) -> None:
        """Cancel all unfinished results, and wait up to `PATIENCE` seconds in all for the threads to end."""
        self.cancel()
        self.join(PATIENCE)

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` in all for the threads of a cancelled pool to end."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while run := self._take(wait=True):
            results = iter(self._act([argument for argument, _ in run]))
            for _, pending in run:
                self._settle([(pending, attempt(next, results))])
                if self._closed.is_set():
                    return
            with self._changed:
                if len(self._threads) > self._wanted():
                    self._threads.remove(threading.current_thread())
                    return

    def _take(self, *, wait: bool) -> list[tuple[A, Pending[R]]]:
        """Take a run from the queue; an empty one if there is nothing to wait for, or the pool is closed."""
        taken: list[tuple[A, Pending[R]]] = []
        nbytes = 0
        while nbytes < RUN_BYTES and len(taken) < _RUN_LENGTH and not self._closed.is_set():
            try:
                asked = self._asked.get(block=wait and not taken)
            except queue.Empty:
                break
            if asked is None:
                break  # closed
            taken.append(asked)
            nbytes += self._weigh(asked[0])
            if len(taken) * self._wanted() > self._asked.qsize():
                break
        return taken

    def _settle(self, outcomes: Iterable[tuple[Pending[R], R | BaseException]]) -> None:
        """Give results or errors to those who wait for them."""
        with self._changed:
            if self._closed.is_set():
                return  # the results were cancelled meanwhile
            for pending, outcome in outcomes:
                pending.settle(outcome)
                self._unfinished.remove(pending)
                if pending in self._awaited:
                    self._awaited.remove(pending)
                    if isinstance(outcome, BaseException):
                        self._awaited.clear()
                    if not self._awaited:
                        self._changed.notify_all()
            self._enlarge()

    def _enlarge(self) -> None:
        """Start a thread if there are more unfinished results than threads, and one more thread is useful."""
        if len(self._threads) < min(len(self._unfinished), self._wanted()) and not self._closed.is_set():
            name = f"farandole-read-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()
