"""Rows on their way from the tasks that read them to the ranks: each comes once, and nothing stays behind."""

import os
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark")

import pyarrow as pa

from farandole.data.formats.shard_source import read_streams
from farandole.errors import CacheError, SourceError
from farandole.meeting.handshake import new_secret
from farandole.spark.driver.log import DriverLog
from farandole.spark.rows.exchange import dealer as dealing
from farandole.spark.rows.exchange.access import Borrowed, KeeperPlan, Kept
from farandole.spark.rows.exchange.dealer import Dealer, DealPlan
from farandole.spark.rows.exchange.gather import gather_rows
from farandole.spark.rows.spill import Spill
from helpers.spark_attacks import WatchedKeeper, keepers

HOST = "127.0.0.1"
SOON = timedelta(seconds=20)
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])


@contextmanager
def driver() -> Iterator[KeeperPlan]:
    """A driver, which keepers hold on to."""
    secret = new_secret()
    with DriverLog(secret, 2, host=HOST) as log:
        plan = KeeperPlan(secret=secret, driver=log.address(HOST))
        yield plan
        log.drain(SOON)
    wait_until_gone(plan)


def wait_until_gone(plan: KeeperPlan) -> None:
    """Wait for the end of this host's keeper."""
    give_up = time.monotonic() + SOON.total_seconds()
    while True:
        assert time.monotonic() < give_up, "the keeper has outlived its job"
        try:
            kept = Kept.here(plan.secret)
        except SourceError:  # it ended between the handshake and its first answer
            continue
        if kept is None:
            return
        kept.close()
        time.sleep(0.01)


def rows(first: int, count: int) -> pa.RecordBatch:
    numbers = range(first, first + count)
    return pa.record_batch([pa.array(numbers, pa.int64()), pa.array([f"row {n}" for n in numbers])], schema=SCHEMA)


def ids(table: pa.Table) -> list[int]:
    found: list[int] = table["id"].to_pylist()
    assert table["text"].to_pylist() == [f"row {number}" for number in found]
    return found


def deal_alone(file: BinaryIO, partition: int, batches: list[pa.RecordBatch], ranks: int) -> list[dict[str, object]]:
    """Deal a partition into `file`, without a keeper."""
    plan = DealPlan(keeper=KeeperPlan(secret=b"", driver=""), number=0, keys=range(ranks), arranged=False)
    return list(Dealer(plan, partition, Borrowed(file, 0, os.fstat(file.fileno()).st_size, "here"), "").deal(batches))


def read_share(file: BinaryIO, share: dict[str, object]) -> list[int]:
    at, length = int(str(share["at"])), int(str(share["length"]))
    return ids(read_streams(pa.py_buffer(os.pread(file.fileno(), length, at))))


@given(
    partitions=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6),
    ranks=st.integers(1, 5),
    turn=st.sampled_from([1, 200, 1 << 20]),
)
def test_every_row_is_dealt_once_and_evenly(partitions: list[list[int]], ranks: int, turn: int) -> None:
    with tempfile.TemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dealing, "TURN_BYTES", turn)
        first = 0
        held: list[list[int]] = [[] for _ in range(ranks)]
        for partition, sizes in enumerate(partitions):
            batches = []
            for size in sizes:
                batches.append(rows(first, size))
                first += size
            shares = deal_alone(file, partition, batches, ranks)
            counts = [0] * ranks
            for share in shares:
                held[int(str(share["key"]))] += read_share(file, share)
                counts[int(str(share["key"]))] += int(str(share["rows"]))
            assert max(counts) - min(counts) <= 1
    assert sorted(row for mine in held for row in mine) == list(range(first))


def test_ranks_take_turns_for_the_odd_row() -> None:
    with tempfile.TemporaryFile() as file:
        whose = [deal_alone(file, partition, [rows(0, 1)], 4)[0]["key"] for partition in range(8)]
    assert whose == [0, 1, 2, 3] * 2


def test_chance_deals_the_same_again_and_not_in_turns() -> None:
    with tempfile.TemporaryFile() as file:
        first, again = (deal_alone(file, 3, [rows(0, 1000)], 2)[0] for _ in range(2))
        mine = read_share(file, first)
        assert mine == read_share(file, again)
        other = read_share(file, deal_alone(file, 4, [rows(0, 1000)], 2)[0])
    assert set(mine) != set(other)
    assert 200 < sum(number % 2 for number in mine) < 300  # classes that alternate do not end on one rank each


def deal(plan: KeeperPlan, partition: int, count: int, *, first: int = 0) -> list[dict[str, object]]:
    """Deal rows to two ranks by way of this host's keeper."""
    with Kept.started(plan) as kept:
        borrowed = kept.borrow()
        with borrowed.file:
            dealer = Dealer(
                DealPlan(keeper=plan, number=0, keys=[0, 1], arranged=False), partition, borrowed, kept.address
            )
            shares = list(dealer.deal([rows(first, count)]))
        kept.commit(dealer.end)
    return shares


def gathered(plan: KeeperPlan, shares: list[dict[str, object]], folder: Path, rank: int = 0) -> list[int]:
    """Return the numbers of a rank's rows among these shares."""
    batches = [pa.RecordBatch.from_pylist([share]) for share in reversed(shares)]
    (made,) = gather_rows(batches, [SCHEMA], str(folder), plan.secret, rank=rank, stop=lambda: False)
    assert os.listdir(folder) == []
    return read_back(made)


def read_back(made: Spill) -> list[int]:
    with made.file as file:
        found = ids(read_streams(pa.py_buffer(os.pread(file.fileno(), 1 << 24, 0))))
    assert len(found) == made.rows
    return found


def test_a_keeper_holds_what_tasks_have_dealt_until_the_job_is_over(tmp_path: Path) -> None:
    with driver() as plan:
        shares = deal(plan, 0, 100) + deal(plan, 1, 50, first=100)
        assert {share["file"] for share in shares} == {0}, "a file that was given back is lent again"
        by_rank = [[share for share in shares if share["key"] == rank] for rank in (0, 1)]
        held = [gathered(plan, mine, tmp_path, rank) for rank, mine in enumerate(by_rank)]
        # A task of both ranks gets the shares of both.
        assert held == [gathered(plan, shares, tmp_path, rank) for rank in (0, 1)]
        assert sorted(held[0] + held[1]) == list(range(150))
        assert gathered(plan, by_rank[0], tmp_path) == held[0]  # a barrier stage that is repeated reads them again


def test_rows_come_from_other_hosts_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with driver() as plan:
        shares = [*deal(plan, 0, 30_000), *deal(plan, 1, 10, first=30_000), *deal(plan, 2, 5000, first=30_010)]
        near = gathered(plan, shares, tmp_path)
        port = str(shares[0]["keeper"]).rpartition(":")[2]
        mixed = [{**share, "keeper": f"localhost:{port}"} if share["partition"] == 1 else share for share in shares]
        assert gathered(plan, mixed, tmp_path) == near
        with monkeypatch.context() as patch:
            patch.setattr(Kept, "here", lambda secret: None)  # as where no task has read
            assert gathered(plan, shares, tmp_path) == near
        assert sorted(near + gathered(plan, shares, tmp_path, 1)) == list(range(35_010))


def test_what_a_task_has_not_committed_is_forgotten() -> None:
    with driver() as plan:
        with Kept.started(plan) as kept:
            lost = kept.borrow()
            with lost.file:
                lost.file.write(b"half of a row")
        again = _until(lambda: _borrowed(plan), lambda each: each.number == lost.number)
        with again.file:
            assert (again.at, os.fstat(again.file.fileno()).st_size) == (0, 0)


def _borrowed(plan: KeeperPlan) -> Borrowed:
    with Kept.started(plan) as kept:
        return kept.borrow()


def _until(make: Callable[[], Borrowed], good: Callable[[Borrowed], bool]) -> Borrowed:
    """Try until the keeper has noticed who has left it."""
    give_up = time.monotonic() + SOON.total_seconds()
    while not good(made := make()):
        made.file.close()
        assert time.monotonic() < give_up
        time.sleep(0.01)
    return made


def test_a_keeper_serves_nobody_without_the_secret() -> None:
    with driver() as plan, Kept.started(plan) as kept:
        with pytest.raises(SourceError, match="out of reach"):
            Kept.at(kept.address, new_secret())
        with Kept.at(kept.address, plan.secret) as far, pytest.raises(SourceError, match="connection ended"):
            far.borrow()
        borrowed = kept.borrow()
        borrowed.file.write(b"not committed")
        borrowed.file.close()
        with (
            Kept.at(kept.address, plan.secret) as far,
            tempfile.TemporaryFile() as out,
            pytest.raises(SourceError, match="13 bytes are missing"),
        ):
            far.copy(borrowed.number, 0, 13, out)


def test_a_keeper_tells_what_its_disk_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no folder").touch()  # where nobody can make a file, root included
    monkeypatch.setenv("LOCAL_DIRS", f"{tmp_path}/no folder")
    said = rf"cache {tmp_path}/no folder: cannot hold .*spark\.local\.dir more room"
    with driver() as plan, Kept.started(plan) as kept, pytest.raises(CacheError, match=said):
        kept.borrow()


def test_a_keeper_may_lend_files_of_a_folder_with_a_long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path.joinpath(*["f" * 250] * 12)
    folder.mkdir(parents=True)
    monkeypatch.setenv("LOCAL_DIRS", str(folder))
    with driver() as plan, Kept.started(plan) as kept, kept.borrow().file as file:
        assert file.tell() == 0


def test_shares_that_are_gone_with_their_keeper_are_named(tmp_path: Path) -> None:
    with driver() as plan:
        shares = deal(plan, 0, 10)
        for pid in keepers(plan):
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(plan)
        with pytest.raises(SourceError, match=rf"rows kept at {shares[0]['keeper']}: .*run the job again"):
            gathered(plan, shares, tmp_path)


@pytest.mark.parametrize("end", ["killed", "cancelled", "dismissed"])
def test_only_a_keeper_that_dies_untold_is_lost(end: str) -> None:
    secret, job = new_secret(), WatchedKeeper()
    with DriverLog(secret, 2, host=HOST, job=job) as log:
        plan = KeeperPlan(secret=secret, driver=log.address(HOST))
        Kept.started(plan).close()
        if end == "killed":
            for pid in keepers(plan):
                os.kill(pid, signal.SIGKILL)
            assert job.lost.wait(SOON.total_seconds())
        elif end == "cancelled":
            log.cancel("the job has ended")
        log.drain(SOON)
        assert log.keepers.lost == ([socket.gethostname()] if end == "killed" else [])
    wait_until_gone(plan)


def test_a_keeper_that_cannot_reach_the_driver_is_not_started() -> None:
    plan = KeeperPlan(secret=new_secret(), driver=f"{HOST}:1")
    with pytest.raises(SourceError, match=rf"cannot be started .*refused.* reach the driver at {HOST}:1"):
        Kept.started(plan)
    assert Kept.here(plan.secret) is None


def test_a_full_disk_is_named() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with tempfile.TemporaryFile() as file:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # bytes
            with pytest.raises(CacheError, match=r"cache here: cannot hold .*spark\.local\.dir more room"):
                deal_alone(file, 0, [rows(0, 10_000)], 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
