"""The pool of threads that read."""

import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait

import pytest

from farandole.data.pool import ReadPool


def test_there_are_as_many_threads_as_are_of_use() -> None:
    wanted, going_on, at_work, most = 2, threading.Semaphore(0), 0, 0
    lock = threading.Lock()

    def act(number: int) -> int:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        assert going_on.acquire(timeout=20)
        with lock:
            at_work -= 1
        return number

    def let_end(count: int) -> None:
        """Let so many calls end, and wait until they have."""
        left = pool.unfinished - count
        going_on.release(count)
        deadline = time.monotonic() + 20
        while pool.unfinished > left:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    pool: ReadPool[int, int] = ReadPool(act, lambda: wanted)
    made = [pool.submit(number) for number in range(20)]
    let_end(4)
    assert (len(pool._threads), most) == (2, 2)
    wanted = 5
    let_end(10)
    assert len(pool._threads) == 5
    wanted = 1
    let_end(6)
    assert [each.result(0) for each in made] == list(range(20))
    assert (len(pool._threads), most) == (1, 5)
    pool.close()


def test_an_idle_pool_has_no_thread() -> None:
    before = threading.active_count()
    pool: ReadPool[int, int] = ReadPool(abs, lambda: 64)
    assert threading.active_count() == before
    pool.close()


def test_closing_waits_once_for_all_threads_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.data.pool.PATIENCE", 1)
    release = threading.Event()
    pool: ReadPool[int, bool] = ReadPool(lambda _: release.wait(20), lambda: 8)
    made = [pool.submit(number) for number in range(10)]
    began = time.monotonic()
    with ThreadPoolExecutor(1) as waiting:
        waits = waiting.submit(wait, made)
        pool.close()
        assert not waits.result(20).not_done
    assert time.monotonic() - began < 4
    for each in [*made, pool.submit(10)]:
        with pytest.raises(CancelledError):
            each.result(0)
    release.set()
    for thread in pool._threads:
        thread.join(20)
        assert not thread.is_alive()
