"""Requests of many threads to one store."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("pyarrow")

from farandole.data.formats.row_groups import File
from farandole.data.stores.ranges import Part, RangeFile, Span
from farandole.data.stores.request_limiter import FIRST_IN_FLIGHT, LEAST_IN_FLIGHT, RequestLimiter
from helpers.forks import forked

PATIENCE = 30.0


def test_all_requests_that_wait_get_their_turn() -> None:
    limiter, lock, now, most = RequestLimiter(patience=PATIENCE), threading.Lock(), 0, 0

    def request() -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.001)
        # Slower and faster ones: more and fewer may be in flight.
        limiter.answered(time.monotonic() - random.choice((0.0, 0.02)))
        with lock:
            now -= 1
        return 1

    for _ in range(40):
        limiter.answered(time.monotonic() - 0.02)
    began = time.monotonic()
    with ThreadPoolExecutor(40) as pool:
        assert sum(pool.map(lambda _: limiter.call("s3://x/y", request), range(300))) == 300
    assert time.monotonic() - began < PATIENCE, "a request was not told of its turn"
    assert LEAST_IN_FLIGHT <= most <= 10


def test_a_forked_process_has_no_requests_in_flight() -> None:
    limiter, held = RequestLimiter(patience=PATIENCE), threading.Event()
    limiter.answered(time.monotonic())
    with ThreadPoolExecutor(LEAST_IN_FLIGHT) as pool:
        others = [pool.submit(limiter.call, "s3://x/y", held.wait) for _ in range(LEAST_IN_FLIGHT)]
        while limiter._running < LEAST_IN_FLIGHT:
            time.sleep(0.001)
        child = forked(lambda: limiter.call("s3://x/z", lambda: True))
        _, status = os.waitpid(child, 0)
        held.set()
        assert all(each.result() for each in others)
    assert status == 0


class Server:
    """A client whose answers come when as many requests wait for them as may be in flight."""

    def __init__(self) -> None:
        self.limiter = RequestLimiter()
        self.together = threading.Barrier(FIRST_IN_FLIGHT, timeout=PATIENCE)
        self.threads = 0

    def url(self, path: str) -> str:
        return path

    def fetch(self, path: str, span: Span | None, mark: str) -> Part:
        self.together.wait()
        asking = [each for each in threading.enumerate() if each.name.startswith("farandole-range")]
        self.threads = max(self.threads, len(asking))
        return Part(span.first if span else 0, b"x", 1 << 40, mark)


def test_distant_ranges_take_no_more_threads_than_requests_in_flight() -> None:
    server = Server()
    with RangeFile(server, File("x", 1 << 40, "mark")) as far:  # type: ignore[arg-type]
        far.fetch(Span(place << 30, (place << 30) + 1) for place in range(4 * FIRST_IN_FLIGHT))
    assert server.threads == FIRST_IN_FLIGHT
