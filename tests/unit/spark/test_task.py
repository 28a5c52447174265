"""Waits of a barrier task for its ranks, without Spark and without processes."""

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("pyspark")

from farandole.launch.failures import Failure
from farandole.spark.jobs import task
from farandole.spark.jobs.barrier import passed_on
from farandole.spark.jobs.task import FLUSH, GONE, GRACE, Task, executor_environment


class Clock:
    """A clock that only waits advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, patience: timedelta) -> bool:
        self.now += patience.total_seconds()
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(task, "time", made)
    return made


def task_of(ranks: int) -> Any:
    """Make a task without Spark's context, whose first rank has failed."""
    made: Any = object.__new__(Task)
    made.ranks, made._cancelled = range(ranks), threading.Event()
    failure = Failure(rank=0, reason="KeyError", code=1)
    made.plan, made.context = SimpleNamespace(driver_log=""), SimpleNamespace(stageId=lambda: 0)
    made._calls = {rank: SimpleNamespace(failure=None if rank else failure) for rank in range(ranks)}
    return made


def test_no_message_of_a_rank_is_queued_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[tuple[object, ...]] = []
    relay = SimpleNamespace(send=lambda *message, **options: queued.append((*message, options)))
    started = task_of(1)
    started._relays, started._env = {0: relay}, {}
    started.plan = SimpleNamespace(call=b"", executable="", start_timeout=GRACE)
    monkeypatch.setattr(task, "RankCall", SimpleNamespace(start=lambda *given, **options: options["on_message"]))
    started._start(0)("log", {"text": "here"})
    assert queued == [("log", {"text": "here"}, {})]


def test_busy_ranks_of_a_task_have_one_time_of_grace_together(clock: Clock) -> None:
    failed = task_of(8)
    for call in failed._calls.values():
        call.wait = clock.wait
    failed._wait_for_end()
    assert clock.now == GRACE.total_seconds()


def test_ranks_that_survive_being_killed_delay_a_task_once(clock: Clock) -> None:
    ended = task_of(8)
    for call in ended._calls.values():
        call.terminate = lambda grace: None
        call.wait = call.wait_gone = clock.wait
    ended._end()
    assert clock.now == (GONE + FLUSH).total_seconds()


def test_a_driver_that_reads_nothing_delays_a_task_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = task_of(8)
    relay = SimpleNamespace(send=lambda kind, payload, must: None, close=clock.wait)
    monkeypatch.setattr(task, "Relay", lambda *given: relay)
    ended._secret, ended._relays = b"", {}
    ended._run_ranks = lambda batches: {}
    for call in ended._calls.values():
        call.value = lambda: b""
    assert len(cast(Task, ended).run([])) == 8
    assert clock.now == FLUSH.total_seconds()


def test_ranks_do_not_inherit_a_member_of_an_elastic_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member may be the driver, and may have started the executors."""
    kept = {"HOROVOD_TIMELINE": "t.json", "FARANDOLE_SPIN": "0"}
    member = {"FARANDOLE_MEMBER": "3", "FARANDOLE_MEMBER_SECRET": "00", "HOROVOD_ELASTIC": "1"}
    assert passed_on(kept | member | {"HOROVOD_RANK": "1"}) == kept
    for name, value in member.items():
        monkeypatch.setenv(name, value)
    assert not executor_environment().keys() & member.keys()
