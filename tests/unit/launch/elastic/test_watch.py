"""The watch over a discovery of hosts: what it takes for a change, and what it makes of errors."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest

from farandole.launch.backend import Host
from farandole.launch.elastic import hosts as watched
from farandole.launch.elastic.hosts import FixedHosts, Found, Watch

Answer = Mapping[str, int] | Exception


class Script:
    """A discovery whose answers the test gives one after the other; the last one is repeated."""

    def __init__(self, *answers: Answer) -> None:
        self.answers, self.asked = list(answers), threading.Condition()
        self.times = 0

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        with self.asked:
            self.times += 1
            self.asked.notify_all()
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, times: int) -> None:
        with self.asked:
            assert self.asked.wait_for(lambda: self.times >= times, 30)


Follow = Callable[..., list[dict[str, int]]]


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Follow]:
    """Return a function that gives the hosts which are found with these answers, change by change."""
    monkeypatch.setattr(watched, "PAUSE", 0.001)
    watches: list[Watch] = []

    def follow(*answers: Answer) -> list[dict[str, int]]:
        script, events = Script(*answers), queue.SimpleQueue[object]()
        watches.append(Watch(script, events))
        script.wait(len(answers) + 2)  # the last answer was handled before the next question
        watches[-1].close()
        found = [events.get_nowait() for _ in range(events.qsize())]
        assert all(isinstance(each, Found) for each in found)
        return [{host.name: host.slots for host in each.hosts} for each in found if isinstance(each, Found)]

    yield follow
    for watch in watches:
        watch.close()  # idempotent


def test_only_changes_are_told(follow: Follow) -> None:
    assert follow({"a": 1}, {"a": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 2}) == [
        {"a": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 2}
    ]  # fmt: skip


def test_a_host_is_gone_when_it_was_missing_twice(follow: Follow) -> None:
    assert follow({"a": 1, "b": 1}, {"a": 1}, {"a": 1, "b": 1}) == [{"a": 1, "b": 1}]
    assert follow({"a": 1, "b": 1}, {"a": 1}, {"a": 1}) == [{"a": 1, "b": 1}, {"a": 1}]
    assert follow({"a": 1, "b": 1}, {}, {"b": 1}, {"b": 1}) == [{"a": 1, "b": 1}, {"b": 1}]


def test_a_host_with_fewer_slots_is_told_at_once(follow: Follow) -> None:
    assert follow({"a": 3}, {"a": 1}) == [{"a": 3}, {"a": 1}]
    assert follow({"a": 3, "b": 1}, {"a": 0, "b": 1}) == [{"a": 3, "b": 1}, {"b": 1}]


def test_errors_leave_the_hosts_as_they_were(follow: Follow, caplog: pytest.LogCaptureFixture) -> None:
    broken = RuntimeError("the cluster is busy")
    with caplog.at_level(logging.WARNING):
        assert follow({"a": 1}, broken, broken, {"a": 1}, broken, {"b": 1}, {"b": 1}) == [
            {"a": 1}, {"a": 1, "b": 1}, {"b": 1}
        ]  # fmt: skip
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["the discovery of hosts failed, they are taken to be as before: the cluster is busy"] * 2


def test_a_missing_answer_beside_an_error_counts_once(follow: Follow) -> None:
    assert follow({"a": 1, "b": 1}, {"a": 1}, RuntimeError("no answer"), {"a": 1, "b": 1}) == [{"a": 1, "b": 1}]


def test_a_discovery_that_never_works_fails_at_once() -> None:
    with pytest.raises(RuntimeError, match="no such cluster"):
        Watch(Script(RuntimeError("no such cluster")), queue.SimpleQueue())


def test_hosts_that_stay_may_be_replaced_by_the_program() -> None:
    fixed, events = FixedHosts({"a": 1}), queue.SimpleQueue[object]()
    watch = Watch(fixed, events)
    try:
        assert events.get(timeout=30) == Found([Host("a", 1)])
        fixed.set({"a": 1, "b": 2})
        assert events.get(timeout=30) == Found([Host("a", 1), Host("b", 2)])
    finally:
        watch.close()
