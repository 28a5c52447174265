"""Files that change, vanish, or are no Parquet: named on every rank, and no part of an epoch counts as a whole one."""

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import Loader, ParquetSource, Reading
from farandole.data.formats.row_groups import RowGroup
from farandole.data.loading.rounds import Columns
from farandole.errors import ConfigError, DataError, SourceError
from helpers.datasets import write_rows

LAYOUT = [[10, 10], [10, 10], [10, 10]]


def change(path: Path) -> None:
    pq.write_table(pa.table({"row": range(20)}), path, row_group_size=10, compression="none")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


class Stuck(ParquetSource):
    """Files in a store that does not answer while `stuck` is not set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.stuck = threading.Event()
        self.stuck.set()

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        assert self.stuck.wait(30)
        return super().read(row_group, columns)


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "changed": (change, "has changed while it was being read"),
    "vanished": (Path.unlink, "vanished since it was listed"),
    "truncated": (cut, "has changed while it was being read"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("when", ["before an epoch", "within an epoch"])
def test_a_file_that_does_not_stay_is_named(tmp_path: Path, fault: str, when: str) -> None:
    write_rows(tmp_path, LAYOUT)
    reading = Reading(shuffle=False, window=1, lanes=1, workers=0, ahead=0)
    loaders = [
        Loader(ParquetSource(str(tmp_path)), batch_size=1, policy="drop", rank=rank, size=2, reading=reading)
        for rank in range(2)
    ]
    batches = [iter(loader) for loader in loaders]
    if when == "within an epoch":
        for each in batches:
            next(each)
    spoil, text = FAULTS[fault]
    spoil(tmp_path / "part-001.parquet")
    for each, loader in zip(batches, loaders, strict=True):
        with pytest.raises(SourceError, match=f"part-001.parquet: .*({text})"):
            list(each)
        # The epoch is not over.
        assert loader.epoch == 0
        assert loader.state_dict()["visited"] < 60


def test_what_is_no_parquet_is_refused_at_the_opening(tmp_path: Path) -> None:
    write_rows(tmp_path, LAYOUT)
    cut(tmp_path / "part-002.parquet")
    with pytest.raises(SourceError, match=r"part-002.parquet: cannot be read"):
        ParquetSource(str(tmp_path))


@pytest.mark.parametrize(("url", "text"), [("nowhere", "is not there"), ("empty", "holds no file"), ("*.x", "no file")])
def test_nothing_to_read_is_named(tmp_path: Path, url: str, text: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=text):
        ParquetSource(str(tmp_path / url))
    for none in ([], "", [""]):
        with pytest.raises(SourceError, match="no URL"):
            ParquetSource(none)


def test_a_scheme_that_nobody_knows_is_named() -> None:
    with pytest.raises(SourceError, match="gopher://x/y: cannot be opened"):
        ParquetSource("gopher://x/y")


def test_files_of_different_schemas_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": [1]}), tmp_path / "1.parquet")
    for other, text in [
        (pa.table({"a": [1]}), "column 'b': is in .*1.parquet, but not in .*2.parquet"),
        (pa.table({"a": [1.5], "b": [1]}), "column 'a': is int64 in .*1.parquet, but double in .*2.parquet"),
        (pa.table({"a": [1], "b": [1], "c": [1]}), "column 'c': is in .*2.parquet, but not in .*1.parquet"),
    ]:
        pq.write_table(other, tmp_path / "2.parquet")
        with pytest.raises(DataError, match=text):
            Loader(ParquetSource(str(tmp_path)), batch_size=1, policy="join")


def test_columns_of_one_name_and_no_columns_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": [1]}), tmp_path / "1.parquet")
    with pytest.raises(ConfigError, match="columns: names no column"):
        Loader(ParquetSource(str(tmp_path)), batch_size=1, policy="join", columns=[])
    pq.write_table(pa.table([pa.array([1])] * 3, names=["a", "b", "b"]), tmp_path / "2.parquet")
    with pytest.raises(DataError, match=r"column 'b': is in .*2.parquet more than once"):
        Loader(ParquetSource(str(tmp_path)), batch_size=1, policy="join")


def test_too_few_rows_for_a_step_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path, [[3, 2]])
    source = ParquetSource(str(tmp_path))
    with pytest.raises(DataError, match="5 rows make no step of 6; take a smaller batch_size"):
        Loader(source, batch_size=3, policy="drop", rank=0, size=2)
    with pytest.raises(DataError, match="5 rows for 6 ranks: some have none to repeat"):
        Loader(source, batch_size=3, policy="pad", rank=0, size=6)


def test_ranks_without_a_row_have_empty_batches(tmp_path: Path) -> None:
    write_rows(tmp_path, [[3, 2]])
    source = ParquetSource(str(tmp_path))
    loaders = [Loader(source, batch_size=3, policy="join", rank=rank, size=8) for rank in range(8)]
    batches = [batch for loader in loaders for batch in loader]
    assert len(batches) == 8
    assert sorted(int(row) for batch in batches for row in batch["row"]) == [0, 1, 2, 3, 4]
    assert sum(batch.weight for batch in batches) == pytest.approx(8)
    assert {str(batch["row"].dtype) for batch in batches} == {"int64"}  # type: ignore[union-attr]


def test_fewer_row_groups_than_ranks_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_rows(tmp_path, [[30, 20]])
    Loader(ParquetSource(str(tmp_path)), batch_size=3, policy="join", rank=0, size=3)
    assert "2 row groups for 3 ranks: several ranks read each of them" in caplog.text


def test_a_row_group_that_does_not_come_has_a_deadline(tmp_path: Path) -> None:
    write_rows(tmp_path, [[3]])
    source = Stuck(str(tmp_path))
    loader = Loader(source, batch_size=3, policy="join", reading=Reading(timeout=0.01))
    source.stuck.clear()
    pieces = iter(loader)
    # The thread is let go only when the error is on its way, so that the test leaves none behind.
    threading.Timer(0.2, source.stuck.set).start()
    with pytest.raises(SourceError, match=r"has not come within 0.01 s"):
        next(pieces)


def test_a_failed_row_group_is_told_while_an_earlier_one_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.data.loading.pool.PATIENCE", 0.1)
    write_rows(tmp_path, [[3], [3]])
    reads, release = itertools.count(), threading.Event()

    class Half(ParquetSource):
        def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
            if not next(reads):
                assert release.wait(30)
            raise SourceError(row_group.file.path, "is broken")

    reading = Reading(lanes=1, window=6, workers=2, timeout=20)
    batches = iter(Loader(Half(str(tmp_path)), batch_size=6, policy="join", reading=reading))
    with pytest.raises(SourceError, match="is broken"):
        next(batches)
    assert not release.is_set()
    release.set()


@pytest.mark.parametrize("hanging", ["store", "transform"])
def test_a_loop_is_left_at_once_while_something_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: str
) -> None:
    monkeypatch.setattr("farandole.data.loading.pool.PATIENCE", 0.1)
    write_rows(tmp_path, LAYOUT)
    answers = threading.Semaphore(1)

    def wait(columns: Columns) -> Columns:
        assert answers.acquire(timeout=30)
        return columns

    class Slow(ParquetSource):
        def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
            assert hanging == "transform" or answers.acquire(timeout=30)
            return super().read(row_group, columns)

    transform = wait if hanging == "transform" else None
    reading = Reading(lanes=1, window=10, ahead=0, workers=1, timeout=3, transform=transform)
    batches = iter(Loader(Slow(str(tmp_path)), batch_size=10, policy="drop", reading=reading))
    next(batches)
    leave = threading.Thread(target=batches.close)  # type: ignore[attr-defined]
    leave.start()
    leave.join(2)
    left = not leave.is_alive()
    answers.release(10)
    for thread in threading.enumerate():
        if thread.name.startswith("farandole-"):
            thread.join(20)
    assert left
