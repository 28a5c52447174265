"""From tasks to the driver: everything arrives, nobody is delayed, strangers are not heard."""

import queue
import resource
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("pyspark")

from farandole.errors import AuthenticationError, ConfigError
from farandole.launch.failures import Failure, to_payload
from farandole.meeting.addresses import split_address
from farandole.meeting.dialer import dial
from farandole.meeting.frames import send
from farandole.meeting.handshake import new_secret
from farandole.spark.driver import peers
from farandole.spark.driver.log import DriverLog
from farandole.spark.driver.peers import Job
from farandole.spark.driver.relay import Over, Relay
from helpers.authentication import authenticate
from helpers.strangers import crowd

SOON = timedelta(seconds=60)  # nothing of it is waited for when all goes well


class KnownAttempt(Job):
    """A job whose stage 7 is in attempt `attempt`, as far as Spark tells (0: it does not)."""

    def __init__(self, attempt: int, *, repeats: bool = False) -> None:
        self.attempt, self.repeats = attempt, repeats
        self.asked: queue.SimpleQueue[int] = queue.SimpleQueue()

    def attempt_of(self, stage: int) -> int:
        self.asked.put(stage)
        return self.attempt if stage == 7 else 0


class Watched(Job):
    """A job that notes its attempts and failures."""

    def __init__(self) -> None:
        self.attempts: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.failed: queue.SimpleQueue[tuple[int, int, str]] = queue.SimpleQueue()

    def on_attempt(self, number: int, failed: Failure | None) -> None:
        self.attempts.put(number)

    def on_failure(self, stage: int, number: int, failure: Failure, culprit: Callable[[], Failure | None]) -> None:
        self.failed.put((stage, number, failure.reason))


class Shown:
    """Collects what a user would see."""

    def __init__(self) -> None:
        self.text: dict[str, str] = {"stdout": "", "stderr": ""}

    def __call__(self, stream: str, text: str) -> None:
        self.text[stream] += text


def no_cancel(reason: str) -> None:
    raise AssertionError(reason)


@pytest.fixture
def secret() -> bytes:
    return new_secret()


def no_meeting(met: list[str]) -> None:
    raise AssertionError(met)


def relay_to(
    log: DriverLog,
    rank: int,
    secret: bytes,
    on_cancel: Callable[[str], None] = no_cancel,
    on_met: Callable[[list[str]], None] = no_meeting,
) -> Relay:
    return Relay(log.address("127.0.0.1"), rank, secret, on_cancel, on_met)


def test_lines_and_messages_show_behind_their_rank(secret: bytes) -> None:
    shown, heard = Shown(), []
    with DriverLog(
        secret, 2, host="127.0.0.1", show=shown, on_message=lambda rank, message: heard.append((rank, message))
    ) as log:
        relays = [relay_to(log, rank, secret) for rank in range(2)]
        relays[0].send("line", {"stream": "stdout", "text": "training"})
        relays[1].send("line", {"stream": "stderr", "text": "careful"})
        relays[1].send("log", {"text": "for the user"}, must=True)
        relays[0].send("progress", {"step": 3})
        for relay in relays:
            relay.close(SOON)
        log.drain(SOON)
    assert sorted(shown.text["stdout"].splitlines()) == ["[0] training", "[1] for the user"]
    assert shown.text["stderr"] == "[1] careful\n"
    assert heard == [(0, {"kind": "progress", "step": 3})]


def test_failures_reach_the_driver_in_order(secret: bytes) -> None:
    with DriverLog(secret, 2, host="127.0.0.1", show=Shown()) as log:
        for known, (rank, consequence) in enumerate(((1, True), (0, False))):
            relay = relay_to(log, rank, secret)
            relay.send("failed", to_payload(Failure(rank=rank, reason="x", code=1, consequence=consequence)))
            relay.close(SOON)
            give_up = time.monotonic() + SOON.total_seconds()
            while len(log.failures.newest) <= known and time.monotonic() < give_up:
                time.sleep(0.005)  # each connection has a thread: rank 0 could overtake rank 1
        log.wait_for_failure(SOON)
        assert [failure.rank for failure in log.failures.newest] == [1, 0]


def test_a_listener_that_fails_does_not_end_the_log(secret: bytes, caplog: pytest.LogCaptureFixture) -> None:
    shown = Shown()

    def fail(rank: int, message: Mapping[str, object]) -> None:
        raise KeyError(rank)

    with DriverLog(secret, 1, host="127.0.0.1", show=shown, on_message=fail) as log:
        relay = relay_to(log, 0, secret)
        relay.send("progress", {})
        relay.send("log", {"text": "still here"})
        relay.close(SOON)
        log.drain(SOON)
    assert shown.text["stdout"] == "[0] still here\n"
    assert "on_message failed" in caplog.text


def test_a_failing_output_file_costs_no_failure_of_a_rank(secret: bytes, caplog: pytest.LogCaptureFixture) -> None:
    asked = threading.Event()

    def broken(stream: str, text: str) -> None:
        asked.set()
        raise AttributeError("no attribute 'flush'")

    with DriverLog(secret, 1, host="127.0.0.1", show=broken) as log:
        relay = relay_to(log, 0, secret)
        relay.send("begin", {"stage": 7})
        relay.send("line", {"stream": "stdout", "text": "training"})
        assert asked.wait(SOON.total_seconds())
        relay.send("failed", to_payload(Failure(rank=0, reason="KeyError", code=1)))
        relay.close(SOON)
        log.drain(SOON)
        assert [failure.reason for failure in log.failures.newest] == ["KeyError"]
    assert "output of rank 0 cannot be shown (AttributeError(\"no attribute 'flush'\"))" in caplog.text


def test_cancel_reaches_tasks_that_are_there_and_tasks_that_come_late(secret: bytes) -> None:
    early, late = threading.Event(), threading.Event()
    with DriverLog(secret, 2, host="127.0.0.1", show=Shown()) as log:
        relays = [relay_to(log, 0, secret, lambda reason: early.set())]
        log.cancel("enough")
        relays.append(relay_to(log, 1, secret, lambda reason: late.set()))
        assert early.wait(60)
        assert late.wait(60)
        for relay in relays:
            relay.close(SOON)


def test_only_one_thread_at_a_time_sends_to_a_task(secret: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    two, together = threading.Barrier(2), threading.Event()

    def watched(sock: socket.socket, message: Over) -> None:
        with suppress(threading.BrokenBarrierError):
            two.wait(0.1)
            together.set()
        send(sock, message)

    with DriverLog(secret, 1, host="127.0.0.1") as log:
        relay = relay_to(log, 0, secret, heard.put)
        log.cancel("here")
        assert heard.get(timeout=SOON.total_seconds()) == "here"
        monkeypatch.setattr(peers, "send", watched)
        other = threading.Thread(target=log.cancel, args=("a",))
        other.start()
        log.cancel("b")
        assert {heard.get(timeout=SOON.total_seconds()) for _ in range(2)} == {"a", "b"}
        other.join()
        relay.close(SOON)
    assert not together.is_set()


def test_a_driver_that_may_not_open_a_connection_for_each_rank_says_so(secret: bytes) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
        with pytest.raises(ConfigError, match=r"num_proc: 1000 ranks need .* may have 1000; raise ulimit -n"):
            DriverLog(secret, 1000, host="127.0.0.1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_connection_without_traffic_is_kept_alive_by_both_ends(
    secret: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialed: list[socket.socket] = []

    def recorded(*args: Any, **options: Any) -> tuple[socket.socket, bytes]:
        connection, who = dial(*args, **options)
        dialed.append(connection)
        return connection, who

    monkeypatch.setattr("farandole.spark.driver.relay.dial", recorded)
    cancelled = threading.Event()
    with DriverLog(secret, 1, host="127.0.0.1") as log:
        log.cancel("here")
        relay = relay_to(log, 0, secret, lambda reason: cancelled.set())
        assert cancelled.wait(SOON.total_seconds())
        for connection in [*dialed, *(peer.connection for peer in log._peers)]:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
        assert len(dialed) == len(log._peers) == 1
        relay.close(SOON)


def test_a_rank_that_has_lost_the_driver_does_not_blame_its_address(
    secret: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled = threading.Event()
    with DriverLog(secret, 1, host="127.0.0.1") as log:
        relay = relay_to(log, 0, secret, lambda reason: cancelled.set())
        log.cancel("here")
        assert cancelled.wait(SOON.total_seconds())
    give_up = time.monotonic() + SOON.total_seconds()
    while not caplog.messages and time.monotonic() < give_up:
        relay.send("log", {"text": "x"})
    relay.close(SOON)
    assert "rank 0 has lost its connection to the driver's log" in caplog.text
    assert "spark.driver.host" not in caplog.text


def test_a_stranger_is_not_heard(secret: bytes) -> None:
    with DriverLog(secret, 1, host="127.0.0.1", show=Shown()) as log:
        with (
            socket.create_connection(split_address(log.address("127.0.0.1")), 5) as stranger,
            pytest.raises(AuthenticationError),
        ):
            authenticate(stranger, new_secret(), me=b"0", accept=False, timeout=SOON)
        log.drain(SOON)


def test_a_crowd_of_strangers_keeps_no_rank_from_the_driver(secret: bytes) -> None:
    shown = Shown()
    with DriverLog(secret, 2, host="127.0.0.1", show=shown) as log, crowd([log.address("127.0.0.1")], 500):
        relays = [relay_to(log, rank, secret) for rank in range(2)]
        for relay in relays:
            relay.send("line", {"stream": "stdout", "text": "here"}, must=True)
            relay.close(SOON)
        log.drain(SOON)
    assert sorted(shown.text["stdout"].splitlines()) == ["[0] here", "[1] here"]


def test_an_unreachable_driver_delays_nobody(secret: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    relay = Relay(f"127.0.0.1:{port}", 0, secret, no_cancel, no_meeting)
    for _ in range(100):
        relay.send("line", {"stream": "stdout", "text": "x"})
    relay.close(SOON)
    assert "cannot reach the driver's log" in caplog.text


def test_lines_that_nobody_takes_are_dropped_and_counted(secret: bytes) -> None:
    release, shown = threading.Event(), Shown()

    def slow(stream: str, text: str) -> None:
        release.wait(60)
        shown(stream, text)

    many = 60_000
    with DriverLog(secret, 1, host="127.0.0.1", show=slow) as log:
        relay = relay_to(log, 0, secret)
        for number in range(many):
            relay.send("line", {"stream": "stdout", "text": f"{number} {'x' * 500}"})
        relay.send("log", {"text": "the one that matters"})
        release.set()
        relay.close(SOON)
        log.drain(SOON)
    lines = shown.text["stdout"].splitlines()
    lost = sum(int(line.split()[2]) for line in lines if line.startswith("[0] ... "))
    shown_lines = sum("xxx" in line for line in lines)
    assert lost > 0
    assert shown_lines + lost == many
    assert "[0] the one that matters" in lines


def test_messages_for_the_user_take_limited_memory(secret: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    release, shown = threading.Event(), Shown()
    monkeypatch.setattr("farandole.spark.driver.relay.MOST_LOGGED", 100)

    def slow(stream: str, text: str) -> None:
        release.wait(60)
        shown(stream, text)

    many = 3000
    with DriverLog(secret, 1, host="127.0.0.1", show=slow) as log:
        relay = relay_to(log, 0, secret)
        for number in range(many):
            relay.send("log", {"text": f"{number} {'x' * 4000}"})
        release.set()
        relay.close(SOON)
        log.drain(SOON)
    lines = shown.text["stdout"].splitlines()
    lost = sum(int(line.split()[2]) for line in lines if line.startswith("[0] ... "))
    assert lost > 0
    assert sum("xxx" in line for line in lines) + lost == many


def test_tasks_meet_by_way_of_the_driver(secret: bytes) -> None:
    heard: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    with DriverLog(secret, 3, host="127.0.0.1", job=KnownAttempt(1)) as log:
        relays = [relay_to(log, rank, secret, on_met=heard.put) for rank in range(3)]
        for rank in (2, 0, 1):
            relays[rank].send("meet", {"stage": 7, "text": f"rank {rank}"})
        assert [heard.get(timeout=SOON.total_seconds()) for _ in relays] == [["rank 0", "rank 1", "rank 2"]] * 3
        for relay in relays:
            relay.close(SOON)


def test_the_driver_knows_which_attempt_has_failed(secret: bytes) -> None:
    job = Watched()
    with DriverLog(secret, 2, host="127.0.0.1", job=job) as log:
        for attempt in (1, 2):
            told, silent = (relay_to(log, rank, secret) for rank in range(2))
            for relay in (told, silent):
                relay.send("begin", {"stage": 7})
            assert job.attempts.get(timeout=SOON.total_seconds()) == attempt
            told.send("failed", to_payload(Failure(rank=0, reason="lost it", code=1, consequence=True)))
            told.close(SOON)
            silent.close(SOON)
            log.drain(SOON)
            assert job.failed.get(timeout=SOON.total_seconds()) == (7, attempt, "lost it")
            assert [failure.reason for failure in log.failures.newest] == ["lost it"], (
                "those of the newest attempt alone"
            )
        guilty = log.failures.culprit(1)
        assert guilty is not None
        assert (guilty.rank, guilty.reason[:14]) == (1, "its Spark task")
        ended = relay_to(log, 0, secret)
        ended.send("begin", {"stage": 7})
        ended.send("done", {})
        ended.close(SOON)
        log.drain(SOON)
        assert log.failures.culprit(3) is None


def test_tasks_of_a_stage_that_spark_repeats_do_not_meet_those_of_the_first(secret: bytes) -> None:
    job = KnownAttempt(2, repeats=True)
    with DriverLog(secret, 2, host="127.0.0.1", job=job) as log:
        relays = [relay_to(log, rank, secret) for rank in range(2)]  # which fail when they hear anything
        for relay in relays:
            relay.send("meet", {"stage": 7, "text": "here"})
        assert job.asked.get(timeout=SOON.total_seconds()) == 7
        for relay in relays:
            relay.close(SOON)


def test_tasks_of_a_stage_that_spark_does_not_repeat_meet_though_its_attempt_is_unknown(secret: bytes) -> None:
    met: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    with DriverLog(secret, 2, host="127.0.0.1", job=KnownAttempt(0)) as log:  # as on Spark Connect
        relays = [
            Relay(log.address("127.0.0.1"), rank, secret, on_cancel=pytest.fail, on_met=met.put) for rank in range(2)
        ]
        for rank, relay in enumerate(relays):
            relay.send("meet", {"stage": 7, "text": f"rank {rank}"})
        for _ in relays:
            assert met.get(timeout=SOON.total_seconds()) == ["rank 0", "rank 1"]
        for relay in relays:
            relay.close(SOON)
