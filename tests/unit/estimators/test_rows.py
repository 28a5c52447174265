"""What ranks agree on about their rows, each rank being a thread."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

pytest.importorskip("pyspark")

import pyarrow as pa

from farandole.errors import DataError
from farandole.estimators.trainers.rows import HASH, VALIDATES, Rows, RowsWanted, fed_as, open_rows

T = TypeVar("T")

TIMEOUT = 20.0  # seconds


class Table:
    """Where `size` threads put an object each and take all of them away."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._round: list[list[object]] = []
        self._count = [0] * size
        self._changed = threading.Condition()

    def gather(self, rank: int) -> Callable[[T], list[T]]:
        def gather(mine: T, /) -> list[T]:
            with self._changed:
                turn = self._count[rank]
                self._count[rank] += 1
                if turn == len(self._round):
                    self._round.append([None] * self._size)
                self._round[turn][rank] = mine
                self._changed.notify_all()
                full = self._changed.wait_for(lambda: None not in self._round[turn], TIMEOUT)
                assert full, f"rank {rank} waited for the others in vain"
                return list(self._round[turn])  # type: ignore[arg-type]

        return gather


def wanted(**changes: object) -> RowsWanted:
    settings: dict[str, object] = {
        "columns": ("x", "label"),
        "validation": None,
        "validation_col": None,
        "batch_size": 4,
        "val_batch_size": 8,
        "shuffle": True,
    }
    return RowsWanted(**(settings | changes))  # type: ignore[arg-type]


def shard(path: Path, labels: list[int], *, arrival: int = 0, validates: list[bool] | None = None) -> Path:
    order = np.random.default_rng(arrival).permutation(len(labels))
    ids = np.array(labels, np.int64)[order]
    hashes = np.array([hash((label, "row")) for label in labels], np.int64)[order]
    flags = np.array(validates if validates is not None else [False] * len(labels), np.int8)[order]
    batch = pa.record_batch({fed_as(0): ids * 0.5, fed_as(1): ids, HASH: hashes, VALIDATES: flags})
    with pa.ipc.new_stream(path, batch.schema) as writer:
        writer.write_batch(batch)
    return path


def on_ranks(paths: list[Path], asked: RowsWanted, seed: int = 1) -> list[Rows]:
    table = Table(len(paths))

    def body(rank: int) -> Rows:
        return open_rows(paths[rank], asked, seed=seed, rank=rank, gather=table.gather(rank))

    with ThreadPoolExecutor(len(paths)) as pool:
        return [each.result(TIMEOUT) for each in [pool.submit(body, rank) for rank in range(len(paths))]]


def labels_of(rows: Rows, epoch: int = 0) -> list[int]:
    return [int(label) for batch in rows.train.epoch(epoch) for label in batch.columns.get("label", [])]


def validated(rows: Rows) -> list[int]:
    assert rows.validate is not None
    return [int(label) for batch in rows.validate.epoch(0) for label in batch.columns["label"]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_row_trains_or_validates_once(tmp_path: Path, size: int) -> None:
    held = [list(range(1000 * rank, 1000 * rank + 40 + 7 * rank)) for rank in range(size)]
    paths = [shard(tmp_path / str(rank), labels) for rank, labels in enumerate(held)]
    ranks = on_ranks(paths, wanted(validation=0.25))
    assert len({rows.train.plan for rows in ranks}) == 1
    train = [label for rows in ranks for label in labels_of(rows)]
    val = [label for rows in ranks for label in validated(rows)]
    assert sorted(train + val) == [label for labels in held for label in labels]
    assert 0 < len(val) < len(train)


def test_the_order_of_arrival_changes_nothing(tmp_path: Path) -> None:
    once, again = (
        on_ranks([shard(tmp_path / f"{arrival}", list(range(50)), arrival=arrival)], wanted(validation=0.2))[0]
        for arrival in (1, 2)
    )
    assert labels_of(once) == labels_of(again)
    assert validated(once) == validated(again)
    assert labels_of(once, 1) != labels_of(once, 0)


def test_without_shuffling_every_epoch_has_the_same_order(tmp_path: Path) -> None:
    rows = on_ranks([shard(tmp_path / "0", list(range(20)))], wanted(shuffle=False))[0]
    assert rows.validate is None
    assert labels_of(rows, 0) == labels_of(rows, 1)


def test_the_validation_column_decides(tmp_path: Path) -> None:
    flags = [label % 3 == 0 for label in range(30)]
    rows = on_ranks([shard(tmp_path / "0", list(range(30)), validates=flags)], wanted(validation_col="held out"))[0]
    assert sorted(validated(rows)) == list(range(0, 30, 3))


def test_a_rank_may_have_no_row(tmp_path: Path) -> None:
    ranks = on_ranks([shard(tmp_path / "0", []), shard(tmp_path / "1", [1, 2, 3, 4, 5])], wanted())
    assert [len(labels_of(rows)) for rows in ranks] == [0, 5]
    assert [batch.rows for batch in ranks[0].train.epoch(0)] == [0, 0]


def test_all_ranks_refuse_the_same_fault(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all 3 rows validate; none is left"):
        on_ranks([shard(tmp_path / "0", [1, 2, 3], validates=[True] * 3)], wanted(validation_col="held out"))
    paths = [shard(tmp_path / "1", [1, 2]), tmp_path / "2"]
    batch = pa.record_batch(
        {
            fed_as(0): pa.array([1.0, None, None]),
            fed_as(1): pa.array([1, 2, 3]),
            HASH: pa.array([1, 2, 3]),
            VALIDATES: pa.array([0, 0, 0], pa.int8()),
        }
    )
    with pa.ipc.new_stream(paths[1], batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(DataError, match="column 'x': 2 of 5 rows are null"):
        on_ranks(paths, wanted())


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_texts_are_rows_of_bytes_and_their_nulls_are_counted(kind: pa.DataType, tmp_path: Path) -> None:
    def opened(name: str, *columns: list[str | None]) -> Rows:
        for rank, texts in enumerate(columns):
            whole = pa.array(texts, pa.string()).cast(pa.binary()).cast(kind)
            fed = {fed_as(0): whole, fed_as(1): np.arange(len(texts)), HASH: np.arange(len(texts))}
            batch = pa.record_batch(fed)
            with pa.ipc.new_stream(tmp_path / f"{name}{rank}", batch.schema) as writer:
                writer.write_batch(batch)
        table = Table(len(columns))

        def body(rank: int) -> Rows:
            return open_rows(tmp_path / f"{name}{rank}", wanted(), seed=0, rank=rank, gather=table.gather(rank))

        with ThreadPoolExecutor(len(columns)) as threads:
            return next(iter(threads.map(body, range(len(columns)))))

    rows = opened("full", ["ä", "", "b"], ["c"])
    assert rows.kinds["x"] == "string"
    assert rows.train.take(np.array([2, 0, 1]))["x"].tolist() == [b"b", "ä".encode(), b""]
    assert rows.train.take(np.empty(0, np.int64))["x"].dtype == object
    with pytest.raises(DataError, match="column 'x': 1 of 3 rows are null"):
        opened("nulls", ["a"], [None, "b"])
