"""Batches as torch tensors."""

import datetime
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")
pytest.importorskip("torch")

import pyarrow as pa
import torch

from farandole.data import Loader, ParquetSource, Ragged, Reading, SparseRows, make_batch_reader, make_reader
from farandole.errors import ConfigError, DataError
from farandole.torch.data import BatchedDataLoader, DataLoader, InMemBatchedDataLoader, TensorLoader, as_tensor
from helpers.datasets import RAGGED, write_rows

ROWS = 122


def rows_of_kinds(first: int, rows: int) -> pa.Table:
    numbers = np.arange(first, first + rows)
    return pa.table(
        {
            "row": numbers,
            "flag": numbers % 2 == 0,
            "pixels": pa.array([[number, -number] for number in numbers.tolist()], pa.list_(pa.float32(), 2)),
            "day": [datetime.date(1970, 1, 1) + datetime.timedelta(days=number) for number in numbers.tolist()],
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> str:
    write_rows(tmp_path / "data", RAGGED["ragged"], rows_of_kinds)
    return str(tmp_path / "data")


def test_batches_are_tensors_that_share_memory(folder: str) -> None:
    loader = TensorLoader(Loader(ParquetSource(folder), batch_size=20, policy="join"))
    assert len(loader) == 7
    seen = []
    for batch in loader:
        assert (batch["row"].dtype, batch["flag"].dtype, batch["pixels"].dtype) == (
            torch.int64,
            torch.bool,
            torch.float32,
        )
        assert torch.equal(batch["pixels"], torch.stack([batch["row"], -batch["row"]], 1).float())
        assert torch.equal(batch["day"], batch["row"])
        assert len(batch["row"]) == batch.rows
        seen += batch["row"].tolist()
    assert sorted(seen) == list(range(ROWS))
    values = np.arange(3.0)
    as_tensor("x", values)[0] = 5
    assert values[0] == 5


def test_a_tensor_loader_goes_on_where_another_stood(folder: str) -> None:
    one, other = (TensorLoader(Loader(ParquetSource(folder), batch_size=20, policy="drop")) for _ in range(2))
    batches: Iterator[Any] = iter(one)
    next(batches)
    other.load_state_dict(one.state_dict())
    assert [batch["row"].tolist() for batch in other] == [batch["row"].tolist() for batch in batches]
    other.set_epoch(3)
    assert other.state_dict()["epoch"] == 3
    assert one.metrics is not None and one.metrics.steps == 6


def test_ragged_and_sparse_rows(folder: str) -> None:
    ragged = as_tensor("x", Ragged(np.array([1.0, 2.0, 3.0]), np.array([0, 1, 1, 3])))
    assert [row.tolist() for row in ragged.unbind()] == [[1.0], [], [2.0, 3.0]]
    times = as_tensor("x", Ragged(np.array([1, 2], "datetime64[ms]"), np.array([0, 2])))
    assert [row.tolist() for row in times.unbind()] == [[1, 2]]
    sparse = SparseRows(np.array([5.0, 6.0]), np.array([2, 0]), np.array([0, 1, 1, 2]), 3)
    assert torch.equal(as_tensor("x", sparse).to_dense(), torch.from_numpy(sparse.dense()))
    with pytest.raises(DataError, match="column 'x': texts and bytes have no tensor"):
        as_tensor("x", np.array(["a"], object))


@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
@pytest.mark.parametrize("kind", [DataLoader, BatchedDataLoader])
def test_readers_are_batched(folder: str, make: Any, kind: Any) -> None:
    with kind(make(folder, num_epochs=2, cur_shard=0, shard_count=1), batch_size=32) as loader:
        for _ in range(2):
            batches = list(loader)
            assert [len(batch["row"]) for batch in batches] == [32] * 7 + [2 * ROWS - 7 * 32]
            assert sorted(int(row) for batch in batches for row in batch["row"]) == sorted([*range(ROWS)] * 2)


@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
@pytest.mark.parametrize("kind", [DataLoader, BatchedDataLoader])
def test_a_loader_that_was_left_early_begins_with_the_first_row(folder: str, make: Any, kind: Any) -> None:
    with kind(make(folder, ["row"], num_epochs=1), batch_size=32) as loader:
        left = iter(loader)
        next(left)
        for _ in range(2):
            assert sorted(int(row) for batch in loader for row in batch["row"]) == list(range(ROWS))
            next(iter(loader))
        with pytest.raises(RuntimeError, match="has begun another pass"):
            next(left)
    with pytest.raises(RuntimeError, match="was stopped"):
        next(iter(loader))


@pytest.mark.parametrize("kind", [DataLoader, BatchedDataLoader])
def test_a_queue_shuffles_row_groups_that_are_not(folder: str, kind: Any) -> None:
    queue = 40
    reader = make_batch_reader(folder, ["row"], shuffle_row_groups=False, num_epochs=2)
    with kind(reader, batch_size=ROWS, shuffling_queue_capacity=queue) as loader:
        epochs = [batch["row"].tolist() for batch in loader]
    assert len({tuple(rows) for rows in epochs}) == 2
    for rows in epochs:
        assert rows != sorted(rows)
        for at in range(0, ROWS, queue):
            assert sorted(rows[at : at + queue]) == list(range(at, min(at + queue, ROWS)))


def test_functions_that_make_batches(folder: str) -> None:
    reading = Reading(shuffle=False)
    with BatchedDataLoader(
        make_batch_reader(folder, ["row"], reading=reading, shuffle_row_groups=False),
        batch_size=4,
        transform_fn=lambda values: torch.from_numpy(values * 2),
    ) as loader:
        assert next(iter(loader))["row"].tolist() == [0, 2, 4, 6]
    with DataLoader(
        make_reader(folder, ["row", "pixels"], shuffle_row_groups=False), batch_size=2, collate_fn=lambda rows: rows
    ) as rows:
        assert [(row["row"], row["pixels"].tolist()) for row in next(iter(rows))] == [(0, [0, 0]), (1, [1, -1])]
    for wrong in ({"batch_size": 0}, {"shuffling_queue_capacity": -1}):
        with make_reader(folder) as reader, pytest.raises(ConfigError, match=next(iter(wrong))):
            DataLoader(reader, **wrong)


def numbers(batches: Any) -> list[list[int]]:
    return [batch["row"].tolist() for batch in batches]


@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
def test_rows_in_memory_come_for_some_epochs(folder: str, make: Any) -> None:
    def loader(**options: Any) -> InMemBatchedDataLoader:
        reader = make(folder, ["row", "pixels"], shuffle_row_groups=False)
        return InMemBatchedDataLoader(reader, batch_size=4, **options)

    with loader(num_epochs=2, rows_capacity=10) as plain:
        assert numbers(plain) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2
        with pytest.raises(RuntimeError, match="once; give the number of epochs"):
            next(iter(plain))
    first, second = (numbers(loader(num_epochs=2, shuffle=True, seed=3)) for _ in range(2))
    assert first == second and first[:31] != first[31:]
    assert [sorted(itertools.chain(*each)) for each in (first[:31], first[31:])] == [list(range(ROWS))] * 2
    once = list(loader(transform_fn=lambda values: torch.as_tensor(values) + 1, rows_capacity=4))
    assert once[0]["pixels"].tolist() == [[1 + row, 1 - row] for row in range(4)]
    with pytest.raises(ConfigError, match="num_epochs"):
        loader(num_epochs=0)


def test_rows_in_memory_have_one_shape(tmp_path: Path) -> None:
    write_rows(tmp_path / "data", [[3]], lambda _, __: pa.table({"x": [[1], [2, 3], [4]]}))
    with pytest.raises(DataError, match="'x': rows in memory must have one shape"):
        InMemBatchedDataLoader(make_batch_reader(str(tmp_path / "data")))
