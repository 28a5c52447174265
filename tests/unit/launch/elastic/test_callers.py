"""Agents that call their launcher, in threads of the test's own process."""

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from farandole.errors import RendezvousError, SlotsTimeout
from farandole.launch.backend import Assignment, Command, Host
from farandole.launch.backends.local import LocalAgent
from farandole.launch.elastic.callers import Callers, call_launcher
from farandole.launch.failures import Failure
from farandole.meeting.handshake import new_secret

SECRET = new_secret()
PATIENCE = timedelta(seconds=60)


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def callers() -> Iterator[Callers]:
    with Callers(SECRET, "127.0.0.1") as callers:
        yield callers


def call(callers: Callers, name: str, *gpus: str) -> threading.Thread:
    agent = LocalAgent()
    agent.gpus = gpus
    address = f"127.0.0.1:{callers.port}"
    thread = threading.Thread(target=call_launcher, args=(address, SECRET, name, agent, PATIENCE), daemon=True)
    thread.start()
    wait_until(lambda: any(each.startswith(name) for each in callers.find_available_hosts_and_slots()))
    return thread


def run_on(callers: Callers, name: str, program: str) -> tuple[int, list[str], Failure | None]:
    """Run a program by an agent, and end the connection to it; return its number, its lines, its failure."""
    host, lines, ended = Host(name, 1), list[str](), queue.SimpleQueue[Failure | None]()
    with callers.backend_of(host).open_agents([host]) as agents:
        assignment = Assignment(rank=3, host=host, env={"PATH": "/usr/bin:/bin"})
        rank = agents[host].start(
            assignment,
            Command(["sh", "-c", program]),
            lambda number, stream, line: lines.append(line),
            lambda number, failure: ended.put(failure),
        )
        failure = ended.get(timeout=60)
        assert rank.wait_gone(PATIENCE)
        return agents[host].first_slot, lines, failure


def test_agents_of_one_machine_have_numbers_gpus_and_shares_of_its_cores(callers: Callers) -> None:
    path = list(sys.path)
    threads = [call(callers, "a", "GPU-5"), call(callers, "b", "GPU-7")]
    assert callers.find_available_hosts_and_slots() == {"a": 1, "b": 1}
    assert run_on(callers, "b", "echo $CUDA_VISIBLE_DEVICES") == (1, ["GPU-5,GPU-7"], None)
    # An agent that has lost its launcher calls again, under another name, and takes the lowest free number.
    wait_until(lambda: callers.find_available_hosts_and_slots() == {"a": 1, "b+1": 1})
    number, lines, failure = run_on(callers, "a", "echo $CUDA_VISIBLE_DEVICES; exit 3")
    assert (number, lines) == (0, ["GPU-5"])
    assert failure is not None and failure.code == 3
    callers.close()
    for thread in threads:
        thread.join(PATIENCE.total_seconds())
        assert not thread.is_alive(), "agents end with their launcher"
    assert sys.path == path


def test_too_few_agents_end_the_wait_with_their_number(callers: Callers) -> None:
    call(callers, "a")
    asked: list[int] = []
    with pytest.raises(SlotsTimeout, match=r"2 ranks need 2 slots, but here after 0.1 s has 1"):
        callers.wait_for(2, timedelta(seconds=0.1), "here", lambda: asked.append(1))
    assert asked
    with pytest.raises(ConnectionError, match="the agent of b is gone"):
        callers.backend_of(Host("b", 1))


def test_a_launcher_that_is_not_there_is_named() -> None:
    with pytest.raises(RendezvousError, match=r"a could not reach the launcher of its job.*127\.0\.0\.1:9"):
        call_launcher("127.0.0.1:9", SECRET, "a", LocalAgent(), timedelta(seconds=1))
