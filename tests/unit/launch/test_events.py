"""Waiting for events: until a time, and in spite of signals that another thread receives."""

import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType

import pytest

from farandole.launch.events import next_event, result_of


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


def test_results_and_errors() -> None:
    futures: list[Future[int]] = [Future(), Future()]
    threading.Timer(1.2, futures[0].set_result, (3,)).start()  # it wakes once before
    futures[1].set_exception(KeyError("x"))
    assert result_of(futures[0]) == 3
    with pytest.raises(KeyError):
        result_of(futures[1])


@pytest.mark.parametrize("wait", [lambda: next_event(queue.SimpleQueue(), None), lambda: result_of(Future())])
def test_a_signal_that_another_thread_receives_ends_the_wait(wait: Callable[[], object]) -> None:
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
            wait()
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR2, before)
