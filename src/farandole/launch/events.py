"""Waiting for the next event of a job on the main thread."""

import math
import queue
import time
from typing import TypeVar

T = TypeVar("T")

WAKE = 1.0  # seconds


def next_event(events: "queue.SimpleQueue[T]", until: float | None) -> T:
    """Return the next event; raises `queue.Empty` at `until`, a time of `time.monotonic`; None: waits for ever.

    Wakes once a second: the system may deliver a signal to another thread, above all to a process that was stopped, and
    Python handles it when the main thread wakes."""
    while True:
        left = math.inf if until is None else max(0.0, until - time.monotonic())
        try:
            return events.get(timeout=min(WAKE, left))
        except queue.Empty:
            if left <= WAKE:
                raise
