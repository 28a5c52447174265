"""Runner of a test's body on several ranks, as threads of this process or as processes."""

import contextlib
import ctypes
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from typing import Literal, TypeVar

from farandole.config import Config
from farandole.core.context import Context
from farandole.core.default import use
from farandole.meeting.rendezvous import ThreadRendezvous
from helpers.outcomes import Outcome, RanksFailed
from helpers.processes import run_processes

T = TypeVar("T")

GRACE = 10.0  # seconds for the other ranks to end by themselves after the first failure, and again after they are ended


def run_ranks(
    size: int,
    body: Callable[..., T],
    *args: object,
    timeout: float = 90.0,
    how: Literal["threads", "processes"] = "threads",
    config: Config | None = None,
    dies: Collection[int] = (),
    hosts: int = 1,
    framework: str | None = None,
) -> list[T]:
    """Run `body(context, *args)` on each of `size` ranks and return the results in rank order.

    Blocks until all ranks are done, `timeout` seconds at most. The first failure ends the other ranks. Raises
    `RanksFailed` with a titled trace of each failed rank; a rank that hangs shows the stacks of its threads. Nothing
    that this function starts survives the call. A rank in `dies` (processes only) must end its own process; its result
    is a `Death`. With `hosts` (threads only) rank r counts as one of host r % hosts. With a `framework` (processes
    only), the ranks' processes start with its modules imported."""
    if how == "processes":
        assert hosts == 1, "processes take their host from the machine"
        outcomes = run_processes(
            size, body, args, timeout=timeout, config=config or Config(), dies=dies, framework=framework
        )
    else:
        assert framework is None, "threads share the modules of this process"
        assert not dies, "a thread cannot die alone: use how='processes'"
        outcomes = _Threads(size, body, args, config, hosts).run(timeout)
    failures = sorted((each for each in outcomes if each.failed), key=lambda each: each.at)
    if failures:
        raise RanksFailed(size, failures) from failures[0].error
    return [each.value for each in sorted(outcomes, key=lambda each: each.rank)]  # type: ignore[misc]


class _Ended(BaseException):
    """Raised in a rank's thread to end it."""


class _Threads:
    """Ranks as threads, over the loopback transport."""

    def __init__(
        self, size: int, body: Callable[..., object], args: tuple[object, ...], config: Config | None, hosts: int
    ) -> None:
        self.size, self.body, self.args, self.config, self.hosts = size, body, args, config or Config(), hosts
        self.rendezvous = ThreadRendezvous.group(size)
        self.contexts: dict[int, Context] = {}
        self.outcomes: list[Outcome] = []  # in the order in which the ranks ended
        self.changed = threading.Condition()

    def run(self, timeout: float) -> list[Outcome]:
        threads = [
            threading.Thread(target=self._live, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        try:
            self._wait(time.monotonic() + timeout)
            hung = [rank for rank, thread in enumerate(threads) if self._unfinished(rank)]
            stacks = [_stack(rank, threads[rank], timeout) for rank in hung]
        finally:
            self._end(threads)
        with self.changed:
            return [each for each in self.outcomes if each.rank not in hung] + stacks

    def _live(self, rank: int) -> None:
        failed_at = math.inf
        try:
            with (
                contextlib.closing(self.rendezvous[rank]) as rendezvous,
                Context(rendezvous, self.config, host=self._host(rank)) as context,
                use(context),
            ):
                self.contexts[rank] = context
                try:
                    outcome = Outcome(rank=rank, value=self.body(context, *self.args))
                except BaseException:
                    # Noted before the context ends, because that makes the other ranks fail too.
                    failed_at = time.monotonic()
                    raise
        except BaseException as error:
            outcome = Outcome.of_error(rank, error, min(failed_at, time.monotonic()))
        with self.changed:
            self.outcomes.append(outcome)
            self.changed.notify_all()

    def _host(self, rank: int) -> str | None:
        return None if self.hosts == 1 else f"host {rank % self.hosts}"

    def _unfinished(self, rank: int) -> bool:
        with self.changed:
            return all(each.rank != rank for each in self.outcomes)

    def _wait(self, deadline: float) -> None:
        """Wait for all ranks until `deadline`; after a failure the others get `GRACE` seconds at most."""
        with self.changed:
            while len(self.outcomes) < self.size and (left := deadline - time.monotonic()) > 0:
                if any(each.failed for each in self.outcomes):
                    deadline = min(deadline, time.monotonic() + GRACE)
                    left = deadline - time.monotonic()
                    self.changed.wait_for(lambda: len(self.outcomes) == self.size, left)
                    return
                self.changed.wait(left)

    def _end(self, threads: list[threading.Thread]) -> None:
        """End running ranks: shut down their contexts, and raise an exception in their Python code."""
        for rank, thread in enumerate(threads):
            if not thread.is_alive():
                continue
            self.rendezvous[rank].close()
            if rank in self.contexts:
                # In another thread, because the shutdown of a rank that hangs may hang too.
                threading.Thread(target=self.contexts[rank].shutdown, name=f"end of rank {rank}", daemon=True).start()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Ended))
        deadline = time.monotonic() + GRACE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # pytest keeps the frames of a failed test, and with this frame all objects that it refers to.
        self.contexts.clear()
        self.rendezvous.clear()


def _stack(rank: int, thread: threading.Thread, timeout: float) -> Outcome:
    frame = sys._current_frames().get(thread.ident or 0)
    where = "".join(traceback.format_stack(frame)) if frame is not None else "(its thread has just ended)\n"
    return Outcome(
        rank=rank, trace=f"did not end within {timeout:g} s, or of the first failure; it stands here:\n{where}"
    )
