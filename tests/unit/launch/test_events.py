"""Waiting for events: until a time, and in spite of signals that another thread receives."""

import queue
import signal
import threading
import time
from types import FrameType

import pytest

from farandole.launch.events import next_event


def test_events_come_in_order_and_the_time_is_kept() -> None:
    events: queue.SimpleQueue[int] = queue.SimpleQueue()
    events.put(1)
    events.put(2)
    assert [next_event(events, None), next_event(events, time.monotonic() - 5)] == [1, 2]
    began = time.monotonic()
    for seconds in (0.0, 1.2):
        with pytest.raises(queue.Empty):
            next_event(events, time.monotonic() + seconds)
    assert time.monotonic() - began >= 1.2


def test_a_signal_that_another_thread_receives_ends_the_wait() -> None:
    class Asked(Exception):
        pass

    def handle(number: int, frame: FrameType | None) -> None:
        raise Asked

    waits, over = threading.Event(), threading.Event()

    def receive() -> None:
        waits.wait(30)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
        over.wait(30)

    thread = threading.Thread(target=receive)
    thread.start()
    before = signal.signal(signal.SIGUSR2, handle)
    try:
        with pytest.raises(Asked):
            threading.Timer(0.2, waits.set).start()  # once this thread waits
            next_event(queue.SimpleQueue(), None)
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR2, before)
