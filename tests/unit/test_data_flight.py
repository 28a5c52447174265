"""Requests of many threads to one store."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from farandole.data.flight import LEAST_IN_FLIGHT, Flight

PATIENCE = 30.0


def test_all_requests_that_wait_get_their_turn() -> None:
    flight, lock, now, most = Flight(patience=PATIENCE), threading.Lock(), 0, 0

    def request() -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.001)
        # Slower and faster ones: more and fewer may be in flight.
        flight.answered(time.monotonic() - random.choice((0.0, 0.02)))
        with lock:
            now -= 1
        return 1

    for _ in range(40):
        flight.answered(time.monotonic() - 0.02)
    began = time.monotonic()
    with ThreadPoolExecutor(40) as pool:
        assert sum(pool.map(lambda _: flight.call("s3://x/y", request), range(300))) == 300
    assert time.monotonic() - began < PATIENCE, "a request was not told of its turn"
    assert LEAST_IN_FLIGHT <= most <= 10
