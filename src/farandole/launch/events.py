"""Waits of the main thread for events and results, which signals end wherever the system delivers them.

The system may deliver a signal to another thread, above all to a process that was stopped; Python handles it when the
main thread wakes. So each of these waits wakes once a second."""

import math
import queue
import time
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

WAKE = 1.0  # seconds


def next_event(events: "queue.SimpleQueue[T]", until: float | None) -> T:
    """Return the next event; raises `queue.Empty` at `until`, a time of `time.monotonic`; None: waits for ever."""
    while True:
        left = math.inf if until is None else max(0.0, until - time.monotonic())
        try:
            return events.get(timeout=min(WAKE, left))
        except queue.Empty:
            if left <= WAKE:
                raise


def result_of(future: Future[T]) -> T:
    """Return the result, or raise the error, of `future` when it is done."""
    while not wait([future], timeout=WAKE).done:
        continue
    return future.result()
