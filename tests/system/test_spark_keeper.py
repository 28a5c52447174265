"""Keepers of dealt rows that are killed: the driver notices at once, and the rows are dealt again where that may be."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from farandole.data import ShardSource
from farandole.errors import CacheError, SourceError
from farandole.spark import run
from farandole.spark.jobs.barrier import run_barrier_job

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

SLOW = 100.0  # seconds that a partition waits for what does not come


@pytest.fixture(scope="module", autouse=True)
def by_value() -> Iterator[None]:
    """Send this module's functions whole: ranks cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def keepers_below(folder: Path) -> list[int]:
    """Return the keepers that hold a file below `folder`, their scratch space."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if b"farandole.spark.rows.exchange.keeper" in (each / "cmdline").read_bytes():
                files = [os.readlink(fd) for fd in (each / "fd").iterdir()]
                if any(file.startswith(f"{folder}/") for file in files):
                    found.append(int(each.name))
    return found


def kill_keeper(folder: Path) -> None:
    """Kill the keeper as soon as there is one."""
    give_up = time.monotonic() + SLOW
    while not (found := keepers_below(folder)):
        assert time.monotonic() < give_up, "there is no keeper"
        time.sleep(0.02)
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def slow_rows(spark: SparkSession, folder: Path, *, waits: int) -> DataFrame:
    """Make three partitions; the first `waits` times the last one notes the time and waits as soon as it has begun."""

    def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            if 29 in batch["id"].to_pylist() and len(list(folder.iterdir())) < waits:
                (folder / str(time.monotonic())).touch()
                time.sleep(SLOW)

    return spark.range(0, 30, 1, 3).mapInArrow(pass_on, "id long")


def ids(rows: ShardSource) -> list[int]:
    return [row for group in rows.row_groups for row in rows.read(group, ["id"])["id"].to_pylist()]


@contextlib.contextmanager
def killer(folder: Path, scratch: Path, times: int) -> Iterator[list[float]]:
    """Kill the keeper `times` times while the block runs, each time once a partition waits."""
    killed: list[float] = []
    over = threading.Event()

    def run() -> None:
        while len(killed) < times and not over.wait(0.02):
            if len(list(folder.iterdir())) > len(killed):
                kill_keeper(scratch)
                killed.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def test_rows_are_dealt_again_when_their_keeper_is_killed(spark: SparkSession, scratch: Path, tmp_path: Path) -> None:
    with killer(tmp_path, scratch, 1) as killed:
        values = run(ids, (slow_rows(spark, tmp_path, waits=1),), num_proc=2)
    assert sorted(row for mine in values for row in mine) == list(range(30))
    assert len(killed) == 1
    assert time.monotonic() - killed[0] < SLOW, "the loss was noticed after the partition's wait only"


def test_the_host_of_lost_rows_is_named_at_once(spark: SparkSession, scratch: Path, tmp_path: Path) -> None:
    with killer(tmp_path, scratch, 2) as killed:
        with pytest.raises(SourceError, match=rf"the rows kept on {socket.gethostname()}: are gone"):
            run(ids, (slow_rows(spark, tmp_path, waits=2),), num_proc=2)
        assert time.monotonic() - killed[1] < SLOW / 2
    assert len(killed) == 2


@pytest.mark.parametrize("also_a_rank", [False, True], ids=["keeper", "keeper and rank"])
def test_a_keeper_killed_in_an_epoch_costs_no_row(
    spark: SparkSession, scratch: Path, tmp_path: Path, also_a_rank: bool
) -> None:

    def main(rows: ShardSource) -> list[int]:
        import farandole.numpy as hvd

        hvd.init()
        seen = ids(rows)
        if hvd.rank() == 0 and not list(tmp_path.iterdir()):
            (tmp_path / "killed").touch()
            kill_keeper(scratch)
            if also_a_rank:
                os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()
        return seen

    values = run_barrier_job(
        spark, main, (spark.range(0, 30, 1, 3),), num_proc=2, description="an epoch", max_attempts=2
    )
    assert sorted(row for mine in values for row in mine) == list(range(30))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_without_room_for_the_rows_is_named(
    spark: SparkSession, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], check=True)
    try:
        monkeypatch.setitem(spark.sparkContext.environment, "LOCAL_DIRS", str(tmp_path))
        with pytest.raises(
            CacheError, match=rf"^cache {tmp_path}: cannot hold .*No space .*spark\.local\.dir more room"
        ):
            run(ids, (spark.range(0, 200_000, 1, 2),), num_proc=2)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
