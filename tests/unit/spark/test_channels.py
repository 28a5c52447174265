"""Between a rank and its task: the call, rows, messages and the outcome."""

import os
import resource
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa

from farandole.errors import CacheError
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
from farandole.spark.rows.disks import local_directory
from farandole.spark.rows.spill import spill

SOON = timedelta(seconds=60)  # nothing of it is waited for when all goes well


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
