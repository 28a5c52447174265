"""Handles of collectives for torch."""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.futures import Future

from farandole.errors import CollectiveError
from farandole.torch.distributed.compiler import run_as_written
from farandole.torch.distributed.names import Part, SinglePart
from farandole.torch.distributed.streams import Mark, SideStreams, gpus_of, new_future

__all__ = ["Explain", "Follower", "Results", "Transfer", "Underway", "Work"]

Results: TypeAlias = list[torch.Tensor]
Explain: TypeAlias = Callable[[CollectiveError], CollectiveError]
Listener: TypeAlias = Callable[[Results | Exception], object]

log = logging.getLogger(__name__)

NO_TIMEOUT = timedelta(0)  # torch's value for the process group's timeout
MOST_UNAWAITED = 64  # works that are kept for their C++ halves

# A future of Python's holds a Python list, and torch's C++ hook for float16 takes only a list of C++.
TYPED = """
def after(ready: Future[int], results: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(ready)
    return results

def typed(ready: Future[int], results: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(after, ready, results)
"""


class Underway:
    """Parts of a collective that are under way, and the step that finishes it.

    For results on GPUs, complete means that the work is queued in a stream, and that the current stream of each waiting
    thread waits for it."""

    __slots__ = ("_explain", "_finish", "_gpus", "_lock", "_mark", "_parts", "_results")

    def __init__(
        self, parts: Sequence[Part], results: Results, explain: Explain, finish: Callable[[], None] | None = None
    ) -> None:
        self._parts, self._results, self._explain, self._finish = parts, results, explain, finish
        self._gpus = gpus_of(results)
        self._mark: Mark | None = None
        self._lock = threading.Lock()

    @property
    def results(self) -> Results:
        """The tensors of the result, which may not hold it yet."""
        return self._results

    @property
    def gpus(self) -> list[torch.device]:
        """The GPUs of the results."""
        return self._gpus

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return all(part.done() for part in self._parts)

    def wait(self) -> Results:
        """Return the tensors of the result; any number of times, and from any thread."""
        try:
            for part in self._parts:
                part.wait()
        except CollectiveError as error:
            raise self._explain(error) from None
        if self._gpus or self._finish is not None:
            with self._lock:
                self._settle()
        self._parts = ()  # free the parts' names for reuse
        return self._results

    def _settle(self) -> None:
        """Finish once; on GPUs in the first thread's current stream, for which the streams of other threads wait."""
        if self._mark is not None:
            return self._mark.hold()
        if self._finish is not None:
            self._finish()
            self._finish = None
        if self._gpus:
            self._mark = Mark(self._gpus)
        return None


@run_as_written
class Work(dist.Work):
    """A collective under way, or completed if `underway` is None.

    A waiting thread drives it. If its future is requested, another thread waits for it."""

    def __init__(self, results: Results, underway: Underway | None, follower: "Follower") -> None:
        super().__init__()
        self.results, self.underway, self._follower = results, underway, follower
        self._future: Future[Results] | None = None
        self._awaited = underway is None
        self.recorded: Future[Results] | None = None  # completes when torch's profiler has its event

    def __del__(self) -> None:
        # torch may keep only the C++ half and wait for that one (`DistributedDataParallel.join` does), which calls
        # `wait` and `get_future` of this half, or blocks for ever if it is gone.
        if not self._awaited:
            self._follower.unawaited.append(self)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True when the tensors hold the result; on GPUs, when later work in the current stream finds it.

        Blocks up to `timeout`, or the process group's timeout; raises the collective's error."""
        underway = self.underway
        self._awaited = True
        if underway is None:
            return True
        # The follower may be waiting for an older collective.
        if timeout > NO_TIMEOUT and not (underway.done() or self._follower.wait(underway, timeout) or underway.done()):
            raise TimeoutError(f"the collective is not done after {timeout}; it goes on, and can be waited for again")
        underway.wait()
        recorded, self.recorded = self.recorded, None
        if recorded is not None and not self._follower.is_current():
            recorded.wait()  # the profiler must not stop while another thread adds the event
        if not underway.gpus:  # other streams may have to wait, too
            self.underway = None
        return True

    def synchronize(self) -> None:
        """Do what `wait` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Do what `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self.underway is None or self.underway.done()

    def is_success(self) -> bool:
        """Return whether it has completed without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return its error; None if it is under way or has not failed."""
        if not self.is_completed():
            return None
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def result(self) -> Results:
        """Return the tensors of the result; blocks as `wait` does."""
        self.wait()
        return self.results

    def get_future(self) -> Future[Results]:
        """Return a future of the value of `result`; its callbacks run on a thread of the process group."""
        self._awaited = True
        if self._future is None:
            if self.underway is None:
                self._future = new_future(gpus_of(self.results))
                self._future.set_result(self.results)
            else:
                self._future = self._follower.future_of(self.underway)
            if any(tensor.dtype == torch.float16 and tensor.is_cpu for tensor in self.results):
                self._future = _torchscript().typed(self._future, self.results)
        return self._future

    def take(self) -> Underway | None:
        """Return what is under way, for another work, which is waited for instead."""
        self._awaited = True
        return self.underway

    def finished_by(self, finish: Callable[[], None], results: Results) -> "Work":
        """Return a work of the same collective with `results`, which `finish` makes after it."""
        underway = self.take()
        if underway is None:
            finish()
            return Work(results, None, self._follower)
        return Work(results, Underway([underway], results, lambda error: error, finish), self._follower)


@run_as_written
class Transfer(Work):
    """A message under way to or from another rank."""

    def __init__(self, part: SinglePart, underway: Underway, follower: "Follower") -> None:
        super().__init__(underway.results, underway, follower)
        self._part = part

    def _source_rank(self) -> int:
        """Return the rank that has sent the received message; torch asks after a receive from any rank."""
        return self._part.source()


def _same(future: Future[Results]) -> Future[Results]:
    return future


class Follower:
    """Thread that waits, one after the other, for the collectives with futures; it starts with the first one.

    A callback may wait for the futures of collectives that it starts: then another thread follows the next ones.
    torch's C++ code needs it, DDP above all: it waits only for futures."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Underway, Listener] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._replaced: set[threading.Thread] = set()  # they end with the callback that they run
        self._lock = threading.Lock()
        self.unawaited: deque[Work] = deque(maxlen=MOST_UNAWAITED)

    def future_of(
        self, underway: Underway, attach: Callable[[Future[Results]], Future[Results]] = _same
    ) -> Future[Results]:
        """Return a future that completes with `underway`, as `attach` returns it while it cannot be complete yet."""
        outcome: Future[Results | Exception] = new_future(underway.gpus)
        # An exception set on a future reaches Python only; a failing callback reaches C++ too.
        future = attach(outcome.then(_result_of))
        self._follow(underway, outcome.set_result)
        return future

    def wait(self, underway: Underway, timeout: timedelta) -> bool:
        """Wait up to `timeout` for `underway`; returns whether it has completed or failed."""
        done = threading.Event()
        self._follow(underway, lambda _: done.set())
        return done.wait(timeout.total_seconds())

    def is_current(self) -> bool:
        """Return whether the calling thread is the follower's."""
        return self._thread is threading.current_thread()

    def close(self) -> None:
        """End the thread after the collectives that it waits for."""
        self.unawaited.clear()
        with self._lock:
            thread, self._thread = self._thread, None
            ending = set(self._replaced)
        if thread is not None:
            self._queue.put(None)
            ending.add(thread)
        for each in ending - {threading.current_thread()}:  # a callback may end the process group
            each.join()

    def _follow(self, underway: Underway, listener: Listener) -> None:
        self._queue.put((underway, listener))
        current = threading.current_thread()
        with self._lock:
            if self._thread is None or self._thread is current:
                if self._thread is current:
                    # A callback may wait for what it starts, as PowerSGD's does: another thread takes over.
                    self._replaced.add(current)
                # A daemon: a program may end without destroying its process group.
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        streams = SideStreams()
        while (followed := self._queue.get()) is not None:
            underway, listener = followed
            try:
                with streams.current(underway.gpus):
                    listener(underway.wait())
            except Exception as error:
                self._tell_failure(listener, error)
            del followed, underway, listener  # drop the tensors too, while it waits for the next
            if self._ends():
                return

    def _ends(self) -> bool:
        """Return whether another thread has taken over from the calling one."""
        current = threading.current_thread()
        with self._lock:
            ends = current in self._replaced
            self._replaced.discard(current)
        return ends

    def _tell_failure(self, listener: Listener, error: Exception) -> None:
        try:
            listener(error)
        except Exception:
            # CUDA has failed. The thread goes on, because later futures would wait for it without a deadline.
            log.exception("%s: a future cannot be completed", self._name)


@lru_cache(1)
def _torchscript() -> torch.jit.CompilationUnit:
    return torch.jit.CompilationUnit(TYPED)


def _result_of(outcome: Future[Results | Exception]) -> Results:
    value: Results | Exception = outcome.value()
    if isinstance(value, Exception):
        raise value
    return value
