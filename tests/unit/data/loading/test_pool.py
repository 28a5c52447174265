"""The pool of threads that read."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TypeVar

import pytest

from farandole.data.loading.pool import RUN_BYTES, Pending, ReadPool

R = TypeVar("R")


def pool_of(act: Callable[[int], R], threads: Callable[[], int], weight: int = RUN_BYTES) -> ReadPool[int, R]:
    """Return a pool that calls `act` with each number, whose result has `weight` bytes."""

    def each(numbers: Sequence[int]) -> Iterator[R | BaseException]:
        for number in numbers:
            try:
                made: R | BaseException = act(number)
            except BaseException as error:
                made = error
            yield made

    return ReadPool(each, threads, lambda _: weight)


def result_of(pool: ReadPool[int, R], pending: Pending[R]) -> R:
    """Wait for a result and return it, or raise its error."""
    assert pool.wait([pending], 20)
    return pending.result()


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
        wait_for(lambda: pool.unfinished <= left)

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    pool = pool_of(act, lambda: wanted)
    made = [pool.submit(number) for number in range(20)]
    wait_for(lambda: at_work == 2)  # a new thread takes a moment to begin
    let_end(4)
    assert (len(pool._threads), most) == (2, 2)
    wanted = 5
    let_end(10)
    assert len(pool._threads) == 5
    wait_for(lambda: at_work == 5)
    wanted = 1
    let_end(6)
    assert [each.result() for each in made] == list(range(20))
    assert (len(pool._threads), most) == (1, 5)
    pool.close()


def test_an_idle_pool_has_no_thread() -> None:
    before = threading.active_count()
    pool = pool_of(abs, lambda: 64)
    assert threading.active_count() == before
    pool.close()


def test_closing_waits_once_for_all_threads_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.data.loading.pool.PATIENCE", 1)
    release = threading.Event()
    pool = pool_of(lambda _: release.wait(20), lambda: 8)
    made = [pool.submit(number) for number in range(10)]
    began = time.monotonic()
    with ThreadPoolExecutor(1) as waiting:
        waits = waiting.submit(pool.wait, made, 20)
        pool.close()
        with pytest.raises(CancelledError):
            waits.result(20)
    assert time.monotonic() - began < 4
    for each in [*made, pool.submit(10)]:
        with pytest.raises(CancelledError):
            each.result()
    release.set()
    for thread in pool._threads:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize(("weight", "longest"), [(RUN_BYTES, 1), (RUN_BYTES // 4, 4), (0, 64)])
def test_small_results_are_made_in_runs(weight: int, longest: int) -> None:
    runs: list[list[int]] = []
    going_on = threading.Event()

    def act(numbers: Sequence[int]) -> Iterator[int | BaseException]:
        assert going_on.wait(20)
        runs.append([*numbers])
        yield from (ValueError(number) if number == 3 else -number for number in numbers)

    pool: ReadPool[int, int] = ReadPool(act, lambda: 1, lambda _: weight)
    made = [pool.submit(number) for number in range(200)]
    going_on.set()
    for number, pending in enumerate(made):
        if number == 3:
            with pytest.raises(ValueError, match="3"):
                result_of(pool, pending)
        else:
            assert result_of(pool, pending) == -number
    pool.close()
    assert [number for run in runs for number in run] == list(range(200))
    assert max(map(len, runs)) == longest


def test_an_error_between_results_is_that_of_the_next_one() -> None:
    def act(numbers: Sequence[int]) -> Iterator[int]:
        if 1 in numbers:
            raise OSError("lost")
        yield from numbers

    pool: ReadPool[int, int] = ReadPool(act, lambda: 1, lambda _: RUN_BYTES)
    made = [pool.submit(number) for number in range(3)]
    assert result_of(pool, made[0]) == 0 and result_of(pool, made[2]) == 2
    with pytest.raises(OSError, match="lost"):
        result_of(pool, made[1])
    pool.close()


def test_a_run_is_no_longer_than_a_thread_s_share() -> None:
    both = threading.Barrier(2)

    def act(number: int) -> int:
        both.wait(20)  # passed only if two threads have numbers at a time
        return number

    pool = pool_of(act, lambda: 2, weight=0)
    assert [result_of(pool, each) for each in [pool.submit(number) for number in range(2)]] == [0, 1]
    pool.close()


def test_a_closed_pool_does_not_finish_a_run() -> None:
    acted: list[int] = []
    began, going_on = threading.Semaphore(0), threading.Semaphore(0)

    def act(number: int) -> None:
        acted.append(number)
        began.release()
        assert going_on.acquire(timeout=20)

    pool = pool_of(act, lambda: 1, weight=0)
    made = [pool.submit(number) for number in range(9)]  # while 0 is acted on, all others are queued
    assert began.acquire(timeout=20)
    going_on.release()
    assert began.acquire(timeout=20)
    pool.cancel()
    going_on.release()
    pool.join(20)
    assert not any(thread.is_alive() for thread in pool._threads)
    assert acted == [0, 1] and made[0].result() is None
    for each in made[1:]:
        with pytest.raises(CancelledError):
            each.result()


def test_waiting_ends_with_the_first_error_or_in_time() -> None:
    release = threading.Event()

    def act(number: int) -> int:
        if number == 1:
            raise TimeoutError("a user's")
        assert release.wait(20)
        return number

    pool = pool_of(act, lambda: 2)
    slow = pool.submit(0)
    began = time.monotonic()
    assert not pool.wait([slow], 0.01)
    failing = pool.submit(1)
    with pytest.raises(TimeoutError, match="a user's"):
        pool.wait([slow, failing], 20)
    with pytest.raises(TimeoutError, match="a user's"):  # and if it has failed before
        pool.wait([slow, failing], 20)
    assert time.monotonic() - began < 10
    release.set()
    assert pool.wait([slow], 20) and slow.result() == 0
    pool.close()
