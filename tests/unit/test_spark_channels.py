"""From rank to task, from task to driver: everything arrives, nobody is delayed, strangers are not heard."""

import os
import queue
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa

from farandole.dialer import dial
from farandole.errors import AuthenticationError, CacheError, ConfigError
from farandole.handshake import authenticate, new_secret, send_frame, split_address
from farandole.launch.channel import (
    LARGEST_MESSAGE,
    LauncherEnd,
    OnMessage,
    Orders,
    Outcome,
    WorkerEnd,
    WorkerValue,
    open_channel,
)
from farandole.launch.failures import Failure, to_payload
from farandole.spark import driver_log
from farandole.spark.disks import local_directory
from farandole.spark.driver_log import DriverLog
from farandole.spark.relay import Relay
from farandole.spark.spill import spill
from helpers.strangers import crowd

SOON = timedelta(seconds=60)  # nothing of it is waited for when all goes well


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
        for rank, consequence in ((1, True), (0, False)):
            relay = relay_to(log, rank, secret)
            relay.send("failed", to_payload(Failure(rank=rank, reason="x", code=1, consequence=consequence)))
            relay.close(SOON)
        log.wait_for_failure(SOON)
        assert [failure.rank for failure in log.failures] == [1, 0]


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
        assert [failure.reason for failure in log.failures] == ["KeyError"]
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

    def watched(sock: socket.socket, payload: bytes) -> None:
        with suppress(threading.BrokenBarrierError):
            two.wait(0.1)
            together.set()
        send_frame(sock, payload)

    with DriverLog(secret, 1, host="127.0.0.1") as log:
        relay = relay_to(log, 0, secret, heard.put)
        log.cancel("here")
        assert heard.get(timeout=SOON.total_seconds()) == "here"
        monkeypatch.setattr(driver_log, "send_frame", watched)
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

    monkeypatch.setattr("farandole.spark.relay.dial", recorded)
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
    monkeypatch.setattr("farandole.spark.relay.MOST_LOGGED", 100)

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
    with DriverLog(secret, 3, host="127.0.0.1") as log:
        log.attempt_of = lambda stage: 1 if stage == 7 else 0
        relays = [relay_to(log, rank, secret, on_met=heard.put) for rank in range(3)]
        for rank in (2, 0, 1):
            relays[rank].send("meet", {"stage": 7, "text": f"rank {rank}"})
        assert [heard.get(timeout=SOON.total_seconds()) for _ in relays] == [["rank 0", "rank 1", "rank 2"]] * 3
        for relay in relays:
            relay.close(SOON)


def test_the_driver_knows_which_attempt_has_failed(secret: bytes) -> None:
    attempts: queue.SimpleQueue[int] = queue.SimpleQueue()
    failures: queue.SimpleQueue[tuple[int, int, str]] = queue.SimpleQueue()
    with DriverLog(secret, 2, host="127.0.0.1") as log:
        log.on_attempt = attempts.put
        log.on_failure = lambda stage, attempt, failure: failures.put((stage, attempt, failure.reason))
        for attempt in (1, 2):
            told, silent = (relay_to(log, rank, secret) for rank in range(2))
            for relay in (told, silent):
                relay.send("begin", {"stage": 7})
            assert attempts.get(timeout=SOON.total_seconds()) == attempt
            told.send("failed", to_payload(Failure(rank=0, reason="lost it", code=1, consequence=True)))
            told.close(SOON)
            silent.close(SOON)
            log.drain(SOON)
            assert failures.get(timeout=SOON.total_seconds()) == (7, attempt, "lost it")
            assert [failure.reason for failure in log.failures] == ["lost it"], "those of the newest attempt alone"
        guilty = log.failure_of(1)
        assert guilty is not None
        assert (guilty.rank, guilty.reason[:14]) == (1, "its Spark task")
        ended = relay_to(log, 0, secret)
        ended.send("begin", {"stage": 7})
        ended.send("done", {})
        ended.close(SOON)
        log.drain(SOON)
        assert log.failure_of(3) is None


def test_tasks_of_a_stage_that_spark_repeats_do_not_meet_those_of_the_first(secret: bytes) -> None:
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()
    with DriverLog(secret, 2, host="127.0.0.1") as log:
        log.feeds_again = True
        log.attempt_of = lambda stage: asked.put(stage) or 2
        relays = [relay_to(log, rank, secret) for rank in range(2)]  # which fail when they hear anything
        for relay in relays:
            relay.send("meet", {"stage": 7, "text": "here"})
        assert asked.get(timeout=SOON.total_seconds()) == 7
        for relay in relays:
            relay.close(SOON)


def test_tasks_of_a_stage_that_spark_does_not_repeat_meet_though_its_attempt_is_unknown(secret: bytes) -> None:
    met: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    with DriverLog(secret, 2, host="127.0.0.1") as log:
        log.attempt_of = lambda stage: 0  # as on Spark Connect
        relays = [
            Relay(log.address("127.0.0.1"), rank, secret, on_cancel=pytest.fail, on_met=met.put) for rank in range(2)
        ]
        for rank, relay in enumerate(relays):
            relay.send("meet", {"stage": 7, "text": f"rank {rank}"})
        for _ in relays:
            assert met.get(timeout=SOON.total_seconds()) == ["rank 0", "rank 1"]
        for relay in relays:
            relay.close(SOON)


class Task(LauncherEnd):
    """The task's end, which keeps the outcome; None when there was none."""

    outcome: Outcome | None = None


class Rank(WorkerEnd):
    """The rank's end, which has taken its call."""

    call: bytes


@contextmanager
def task_and_rank(on_message: OnMessage, call: bytes = b"call") -> Iterator[tuple[Task, Rank]]:
    """Connect a task, which listens on a thread of its own, and a rank that has its call; close both at the end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    task, rank = Task(ours), Rank(theirs)

    def listen() -> None:
        task.hand_over(["a path"], "a runner", call, SOON)
        try:
            task.outcome = task.receive_outcome(on_message)
        except EOFError:
            task.close()

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        *setup, rank.call = rank.receive_call()
        assert setup == [["a path"], "a runner"]
        yield task, rank
    finally:
        rank.close()
        thread.join(SOON.total_seconds())
        task.close()


def test_a_rank_gets_its_orders_and_its_rows(tmp_path: os.PathLike[str]) -> None:
    heard: list[tuple[str, Mapping[str, object]]] = []
    schema = pa.schema([("x", pa.int64())])
    batches = [pa.record_batch([pa.array([1, 2, 3])], schema=schema), pa.record_batch([pa.array([4])], schema=schema)]
    rows = spill(batches, schema, str(tmp_path), stop=lambda: False)
    with task_and_rank(lambda kind, payload: heard.append((kind, payload))) as (task, rank):
        task.begin(Orders(env={"A": "1"}, fds=[rows.file.fileno()]))
        orders = rank.receive_orders()
        rows.close()
        assert orders.env == {"A": "1"}
        (fd,) = orders.fds
        with pa.memory_map(f"/proc/self/fd/{fd}") as mapped:
            assert pa.ipc.open_stream(mapped).read_all().to_pydict() == {"x": [1, 2, 3, 4]}
        os.close(fd)
        assert rank.send("progress", {"step": 1})
    assert heard == [("progress", {"step": 1})]
    assert rows.rows == 4
    assert os.listdir(tmp_path) == []


def test_a_rank_without_rows_gets_a_file_with_columns(tmp_path: os.PathLike[str]) -> None:
    rows = spill([], pa.schema([("x", pa.int64())]), str(tmp_path), stop=lambda: False)
    with pa.memory_map(f"/proc/self/fd/{rows.file.fileno()}") as mapped:
        assert pa.ipc.open_stream(mapped).read_all().to_pydict() == {"x": []}
    rows.close()


def test_rows_of_a_rank_that_has_failed_are_not_written_to_the_end(tmp_path: os.PathLike[str]) -> None:
    batch = pa.record_batch([pa.array([1])], schema=pa.schema([("x", pa.int64())]))
    rows = spill([batch] * 10, batch.schema, str(tmp_path), stop=lambda: True)
    assert rows.rows == 1
    rows.close()


def test_a_disk_that_cannot_be_written_is_named(tmp_path: os.PathLike[str]) -> None:
    missing = f"{tmp_path}/none"
    with pytest.raises(CacheError, match=f"{missing}: cannot hold the rank's rows .*spark.local.dir"):
        spill([], pa.schema([]), missing, stop=lambda: False)


def test_a_full_disk_is_named_and_nothing_stays(tmp_path: os.PathLike[str]) -> None:
    batch = pa.record_batch({"x": pa.array(range(100_000))})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # bytes
        with pytest.raises(CacheError, match=f"{tmp_path}: cannot hold .*spark.local.dir more room") as caught:
            spill([batch] * 3, batch.schema, str(tmp_path), stop=lambda: False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.folder == str(tmp_path)
    assert not [link for link in os.listdir("/proc/self/fd") if str(tmp_path) in _target(link)]


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""  # that of the listing itself


def test_ranks_of_one_host_take_turns_among_its_disks(tmp_path: os.PathLike[str]) -> None:
    disks = [f"{tmp_path}/{name}" for name in "ab"]
    for disk in disks:
        os.mkdir(disk)
    env = {"SPARK_LOCAL_DIRS": f"{disks[0]},{tmp_path}/gone,{disks[1]}"}
    assert [local_directory(env, turn) for turn in range(3)] == [disks[0], disks[1], disks[0]]


def test_messages_never_block_a_rank_whose_task_does_not_read() -> None:
    go_on, heard = threading.Event(), []

    def hear(kind: str, payload: Mapping[str, object]) -> None:
        go_on.wait(5)
        heard.append((kind, payload))

    with task_and_rank(hear) as (task, rank):
        task.begin(Orders())
        rank.receive_orders()
        sent = [rank.send("progress", {"text": "x" * 10_000}) for _ in range(100)]
        assert not all(sent)
        go_on.set()
        assert rank.send("log", {"text": "patient"}, patient=True)
    dropped = [payload["messages"] for kind, payload in heard if kind == "dropped"]
    assert sum(int(str(each)) for each in dropped) == sent.count(False)
    assert heard[-1] == ("log", {"text": "patient"})


def test_a_rank_that_never_comes_does_not_keep_its_task() -> None:
    task, theirs = open_channel()
    theirs.close()
    with pytest.raises(EOFError):
        task.hand_over([], "", b"", SOON)
    task.begin(Orders())
    task.close()


def test_a_rank_that_does_not_start_does_not_keep_its_task() -> None:
    task, theirs = open_channel()
    with theirs, pytest.raises(TimeoutError):
        task.hand_over([], "", b"", timedelta(milliseconds=10))
    task.close()


def test_a_task_that_ends_first_ends_the_wait_for_orders() -> None:
    task, theirs = open_channel()
    waiting = threading.Thread(target=task.close)
    rank = WorkerEnd(theirs)
    with pytest.raises(EOFError):
        waiting.start()
        rank.receive_orders()
    rank.close()
    waiting.join(5)


@pytest.mark.parametrize("size", [0, 1, LARGEST_MESSAGE, LARGEST_MESSAGE + 1, 10 * LARGEST_MESSAGE])
def test_calls_and_values_of_any_size(size: int) -> None:
    heard: list[tuple[str, Mapping[str, object]]] = []
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    with task_and_rank(lambda kind, payload: heard.append((kind, payload)), data) as (task, rank):
        task.begin(Orders(env={"A": "1"}, keep=False))
        assert rank.call == data
        assert rank.receive_orders() == Orders(env={"A": "1"}, fds=[], keep=False)
        rank.send("log", {"text": "before"})
        rank.send_outcome(WorkerValue(data=data))
    assert heard == [("log", {"text": "before"})]
    assert task.outcome == WorkerValue(data=data)


def test_a_rank_that_ends_with_unread_orders_is_heard_to_its_end() -> None:
    task, theirs = open_channel()
    rank = WorkerEnd(theirs)
    thread = threading.Thread(target=task.hand_over, args=([], "", b"call", SOON))
    thread.start()
    rank.receive_call()
    thread.join(SOON.total_seconds())
    task.begin(Orders())
    rank.send_outcome(WorkerValue(data=b"value"))
    rank.close()  # before its task has read
    assert task.receive_outcome(lambda kind, payload: None) == WorkerValue(data=b"value")
    with pytest.raises(EOFError):
        task.receive_outcome(lambda kind, payload: None)
    task.close()
