"""Rows of Arrow IPC files as numpy arrays."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa

from farandole.data import ArrowShard, Column, ColumnFacts, LocalPlan, ShardLoader, agree_on_column
from farandole.errors import DataError


def write(path: Path, batches: list[pa.RecordBatch]) -> Path:
    with pa.ipc.new_stream(path, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return path


def some_rows(first: int, count: int) -> pa.RecordBatch:
    rows = np.arange(first, first + count)
    return pa.record_batch(
        {
            "number": pa.array(rows * 0.5),
            "label": pa.array(rows.astype(np.int64)),
            "small": pa.array((rows % 100).astype(np.int8)),
            "pixels": pa.array([[float(row), float(row) + 0.25, -float(row)] for row in rows], pa.list_(pa.float32())),
        }
    )


def open_column(shard: ArrowShard, name: str) -> Column:
    return shard.column(name, agree_on_column([shard.facts(name)]))


def test_rows_of_several_chunks_come_in_the_order_asked(tmp_path: Path) -> None:
    batches = [some_rows(0, 7), some_rows(7, 0), some_rows(7, 1), some_rows(8, 30).slice(2, 20)]
    shard = ArrowShard(write(tmp_path / "rows", batches))
    held = np.array([*range(8), *range(10, 30)])
    assert shard.rows == len(held)
    rows = np.random.default_rng(0).permutation(len(held))[:19]
    assert np.array_equal(open_column(shard, "number").take(rows), held[rows] * 0.5)
    assert np.array_equal(open_column(shard, "label").take(rows), held[rows])
    assert np.array_equal(open_column(shard, "small").take(rows), held[rows])
    pixels = open_column(shard, "pixels").take(rows)
    assert pixels.dtype == np.float32
    assert np.array_equal(pixels, np.stack([held[rows], held[rows] + 0.25, -held[rows]], axis=1))


def test_taken_rows_are_the_callers_own(tmp_path: Path) -> None:
    column = open_column(ArrowShard(write(tmp_path / "rows", [some_rows(0, 5)])), "pixels")
    taken = column.take(np.array([1, 2]))
    taken[:] = 0
    assert column.take(np.array([1]))[0, 0] == 1


def test_large_lists_and_lists_that_start_later(tmp_path: Path) -> None:
    lists = pa.array([[1, 2], [3, 4], [5, 6]], pa.large_list(pa.int32()))
    shard = ArrowShard(write(tmp_path / "rows", [pa.record_batch({"x": lists.slice(1)})]))
    assert np.array_equal(open_column(shard, "x").take(np.array([1, 0])), [[5, 6], [3, 4]])


def test_nulls_are_counted_by_row(tmp_path: Path) -> None:
    columns = {
        "number": pa.array([1.0, None, 3.0, None]),
        "pixels": pa.array([[1.0, None], None, [None, None], [3.0, 4.0]], pa.list_(pa.float64())),
    }
    shard = ArrowShard(write(tmp_path / "rows", [pa.record_batch(columns)]))
    assert shard.facts("number").rows_with_nulls == 2
    assert shard.facts("pixels").rows_with_nulls == 3
    with pytest.raises(DataError, match=r"column 'pixels': 3 of 4 rows are null"):
        agree_on_column([shard.facts("pixels")])


def facts(rows: int, *, nulls: int = 0, lengths: tuple[int, int] | None = None) -> ColumnFacts:
    shortest, longest = lengths or (0, 0)
    return ColumnFacts(
        name="x",
        dtype="float32",
        rows=rows,
        rows_with_nulls=nulls,
        listed=lengths is not None,
        shortest=shortest,
        longest=longest,
    )


def test_ranks_agree_on_one_length() -> None:
    assert agree_on_column([facts(3), facts(0)]) is None
    assert agree_on_column([facts(3, lengths=(4, 4)), facts(0, lengths=(0, 0))]) == 4
    with pytest.raises(DataError, match="arrays of 4 to 5 numbers"):
        agree_on_column([facts(3, lengths=(4, 4)), facts(2, lengths=(5, 5))])
    with pytest.raises(DataError, match="2 of 8 rows"):
        agree_on_column([facts(3), facts(5, nulls=2)])
    with pytest.raises(DataError, match="no rows"):
        agree_on_column([facts(0), facts(0)])
    with pytest.raises(DataError, match="empty"):
        agree_on_column([facts(3, lengths=(0, 0))])


def test_what_no_tensor_holds_is_named(tmp_path: Path) -> None:
    columns = {"word": pa.array(["a"]), "flag": pa.array([True]), "deep": pa.array([[[1.0]]])}
    shard = ArrowShard(write(tmp_path / "rows", [pa.record_batch(columns)]))
    for name in columns:
        with pytest.raises(DataError, match=f"column '{name}': no tensor holds"):
            shard.facts(name)
    with pytest.raises(DataError, match="is not in the data, which has word, flag, deep"):
        shard.facts("number")


def test_compressed_values_are_refused(tmp_path: Path) -> None:
    batch = some_rows(0, 1000)
    with pa.ipc.new_stream(
        tmp_path / "rows", batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as writer:
        writer.write_batch(batch)
    with pytest.raises(DataError, match="without compression"):
        open_column(ArrowShard(tmp_path / "rows"), "number")


def test_an_empty_shard_has_no_rows_and_no_fault(tmp_path: Path) -> None:
    shard = ArrowShard(write(tmp_path / "rows", [some_rows(0, 0)]))
    seen = [shard.facts("pixels"), facts(2, lengths=(5000, 5000))]
    column = shard.column("pixels", agree_on_column(seen))
    plan = LocalPlan(rows=(0, 2), batch_size=1)
    loader = ShardLoader(columns={"pixels": column}, rows=np.arange(0), plan=plan, rank=0, seed=1)
    assert [(batch.rows, batch.weight) for batch in loader.epoch(0)] == [(0, 0.0), (0, 0.0)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_together_see_every_row_once_in_each_epoch(tmp_path: Path, ranks: int) -> None:
    held = [11 * rank + 3 for rank in range(ranks)]
    plan = LocalPlan(rows=tuple(held), batch_size=4)
    orders = []
    for epoch in range(3):
        labels, steps = [], set()
        for rank, count in enumerate(held):
            path = write(tmp_path / f"{rank}", [some_rows(1000 * rank, 2), some_rows(1000 * rank + 2, count - 2)])
            column = open_column(ArrowShard(path), "label")
            loader = ShardLoader(columns={"label": column}, rows=np.arange(count), plan=plan, rank=rank, seed=5)
            batches = list(loader.epoch(epoch))
            steps.add(len(batches))
            labels += [int(label) for batch in batches if batch.rows for label in batch.columns["label"]]
        assert steps == {plan.steps}
        assert sorted(labels) == sorted(1000 * rank + row for rank, count in enumerate(held) for row in range(count))
        orders.append(labels)
    assert orders[0] != orders[1] != orders[2]
