"""Batches as TensorFlow tensors and as datasets."""

import datetime
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

import farandole.numpy as hvd
from farandole.core.context import Context
from farandole.data import (
    Growing,
    GrowingLoader,
    Loader,
    ParquetSource,
    Policy,
    Ragged,
    Reading,
    SparseRows,
    files,
    make_batch_reader,
    make_reader,
)
from farandole.data.loading.rounds import Columns
from farandole.data.loading.values import empty_aligned
from farandole.data.transform import TransformSpec
from farandole.errors import ConfigError, DataError, SourceError
from helpers.datasets import RAGGED, write_images, write_rows
from helpers.ranks import run_ranks

tf = pytest.importorskip("tensorflow")

from farandole.tensorflow.data import (  # noqa: E402  # after the module that it needs is known to be there
    TensorLoader,
    as_tensor,
    make_batched_dataset,
    make_dataset,
    make_petastorm_dataset,
)

ROWS = 122


def rows_of_kinds(first: int, rows: int) -> pa.Table:
    numbers = list(range(first, first + rows))
    vector = pa.struct(
        [
            ("type", pa.int8()),
            ("size", pa.int32()),
            ("indices", pa.list_(pa.int32())),
            ("values", pa.list_(pa.float64())),
        ]
    )
    return pa.table(
        {
            "row": numbers,
            "flag": [number % 2 == 0 for number in numbers],
            "pixels": pa.array([[number, -number] for number in numbers], pa.list_(pa.float32(), 2)),
            "day": [datetime.date(1970, 1, 1) + datetime.timedelta(days=number) for number in numbers],
            "text": [f"é{number}" for number in numbers],
            "blob": [b"%d" % number for number in numbers],
            "steps": pa.array([[number] * (number % 3) for number in numbers], pa.list_(pa.int32())),
            "vector": pa.array(
                [{"type": 0, "size": 9, "indices": [number % 9], "values": [number]} for number in numbers], vector
            ),
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> str:
    write_rows(tmp_path / "data", RAGGED["ragged"], rows_of_kinds)
    return str(tmp_path / "data")


def loader_of(folder: str, policy: Policy = "join", rank: int = 0, size: int = 1, **reading: Any) -> Loader:
    return Loader(ParquetSource(folder), batch_size=20, policy=policy, rank=rank, size=size, reading=Reading(**reading))


def check(batch: dict[str, Any]) -> list[int]:
    """Compare all columns with what the row's number says; gives the numbers."""
    rows: list[int] = batch["row"].numpy().tolist()
    assert batch["flag"].numpy().tolist() == [row % 2 == 0 for row in rows]
    assert batch["pixels"].numpy().tolist() == [[row, -row] for row in rows]
    assert batch["day"].numpy().tolist() == rows
    assert batch["text"].numpy().tolist() == [f"é{row}".encode() for row in rows]
    assert batch["blob"].numpy().tolist() == [b"%d" % row for row in rows]
    assert batch["steps"].to_list() == [[row] * (row % 3) for row in rows]
    dense = np.zeros((len(rows), 9))
    dense[np.arange(len(rows)), np.array(rows, int) % 9] = rows
    assert np.array_equal(tf.sparse.to_dense(batch["vector"]).numpy(), dense)
    return rows


TYPES = {
    "row": tf.TensorSpec((None,), tf.int64),
    "flag": tf.TensorSpec((None,), tf.bool),
    "pixels": tf.TensorSpec((None, 2), tf.float32),
    "day": tf.TensorSpec((None,), tf.int64),
    "text": tf.TensorSpec((None,), tf.string),
    "blob": tf.TensorSpec((None,), tf.string),
    "steps": tf.RaggedTensorSpec((None, None), tf.int32, row_splits_dtype=tf.int64),
}


@pytest.mark.parametrize("size", [1, 4])
def test_every_row_once_per_epoch_as_datasets_and_as_tensors(folder: str, size: int) -> None:
    seen: list[int] = []
    for rank in range(size):
        loader = loader_of(folder, rank=rank, size=size)
        dataset = make_dataset(loader)
        assert {name: dataset.element_spec[name] for name in TYPES} == TYPES
        for epoch in range(2):
            assert loader.epoch == epoch
            seen += [row for batch in dataset for row in check(batch)]
        seen += [row for batch in TensorLoader(loader) for row in check(batch)]
    assert Counter(seen) == Counter([*range(ROWS)] * 3)


@pytest.mark.parametrize("make", [make_dataset, TensorLoader])
def test_an_interrupted_epoch_goes_on_where_it_stood(folder: str, make: Any) -> None:
    loader, other = loader_of(folder), loader_of(folder)
    dataset = make(loader)
    # What users chain must not take batches ahead either.
    if make is make_dataset:
        dataset = dataset.map(lambda columns: columns)
    seen = [row for batch in islice(iter(dataset), 3) for row in check(batch)]
    assert loader.state_dict()["visited"] == 60
    other.load_state_dict(loader.state_dict())
    seen += [row for batch in make(other) for row in check(batch)]
    assert sorted(seen) == list(range(ROWS))
    assert other.epoch == 1


def test_shapes_are_known_where_batches_are_full(folder: str) -> None:
    dataset = make_dataset(loader_of(folder, "pad"), weights="weight")
    assert dataset.element_spec["pixels"].shape == (20, 2)
    rows = {int(row) for batch in dataset for row, weight in zip(batch["row"], batch["weight"], strict=True) if weight}
    assert rows == set(range(ROWS))
    (*_, last) = dataset
    assert last["weight"].numpy().tolist() == [1.0] * 2 + [0.0] * 18
    # With rows shared out, the weights make the average over ranks the mean over the step, whose rows are 42 here.
    weights = [
        batch["weight"].numpy().tolist()
        for rank in range(4)
        for batch in islice(make_dataset(loader_of(folder, rank=rank, size=4), weights="weight"), 1, 2)
    ]
    assert sum(map(len, weights)) == 42
    assert weights == [[pytest.approx(len(each) * 4 / 42)] * len(each) for each in weights]
    with pytest.raises(ConfigError, match="there is a column 'row' already"):
        make_dataset(loader_of(folder), weights="row")


def test_large_rows_share_memory_and_others_are_copied() -> None:
    aligned = empty_aligned((100, 16), np.dtype(np.float32))
    aligned[:] = 1
    for values in (
        aligned[50:],
        np.frombuffer(bytes(640), np.float32),
        aligned[50:, :5],
        empty_aligned((0,), aligned.dtype),
    ):
        tensor = as_tensor("x", values)
        shared = np.from_dlpack(tensor).ctypes.data == values.ctypes.data and values.size
        assert bool(shared) == (values is not None and values.size == 800)
        # An operation on memory that is not aligned would end the process.
        assert np.array_equal((tensor * 2).numpy(), values * 2)
    flags = empty_aligned((64,), np.dtype(bool))
    flags[:] = True
    assert tf.reduce_all(as_tensor("x", flags))


def test_batches_of_a_loader_are_aligned(tmp_path: Path) -> None:
    def wide(first: int, rows: int) -> pa.Table:
        return pa.table({"x": pa.array([[number] * 16 for number in range(first, first + rows)], pa.list_(pa.int64()))})

    write_rows(tmp_path, [[40, 40], [40]], wide)
    for shuffle in (True, False):
        for batch in loader_of(str(tmp_path), shuffle=shuffle):
            values = batch["x"]
            assert isinstance(values, np.ndarray) and values.flags.writeable
            assert np.from_dlpack(as_tensor("x", values)).ctypes.data == values.ctypes.data


@pytest.mark.parametrize("prefetch", [False, True])
def test_what_the_loader_meets_ends_the_epoch_with_its_text(folder: str, prefetch: bool) -> None:
    loader = loader_of(folder, shuffle=False, window=1, workers=0, ahead=0)
    dataset = make_dataset(loader)
    batches: Iterator[Any] = iter(dataset.prefetch(2) if prefetch else dataset)
    next(batches)
    (Path(folder) / "part-003.parquet").unlink()
    with pytest.raises(tf.errors.OpError, match=r"SourceError: .*part-003.parquet: .*vanished since it was listed"):
        list(batches)
    assert loader.epoch == 0
    with pytest.raises(SourceError, match=r"part-003.parquet: is not there"):
        list(TensorLoader(loader))


def test_ranks_take_the_batches_of_datasets_together(folder: str, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other")

    def body(context: Context) -> int:
        mine = tmp_path / ("other" if context.rank else "data")
        loader = Loader(
            ParquetSource(str(mine)),
            batch_size=4,
            policy="join",
            columns=["row"],
            rank=context.rank,
            size=2,
            reading=Reading(shuffle=False, window=1, workers=0, ahead=0),
            gather=hvd.allgather_object,
        )
        batches = iter(make_dataset(loader))
        next(batches)
        if context.rank == 1:
            (mine / "part-003.parquet").unlink()
        whose = "" if context.rank else "rank 1: "
        with pytest.raises(tf.errors.OpError, match=f"SourceError: {whose}{tmp_path}/other/part-003.parquet"):
            list(batches)
        return loader.state_dict()["visited"]

    here, there = run_ranks(2, body)
    assert here == there


def test_columns_that_no_tensor_holds(folder: str) -> None:
    with pytest.raises(DataError, match="column 'x': no tensor holds objects of dict"):
        as_tensor("x", np.array([{}], object))
    kinds = iter([np.int64, np.float64])

    def change(columns: Columns) -> Columns:
        return {"row": np.asarray(columns["row"]).astype(next(kinds))}

    with pytest.raises(tf.errors.OpError, match="column 'row': was of int64 in the first rows, and is of float64 now"):
        list(make_dataset(loader_of(folder, transform=change, workers=0)))


def test_ragged_and_sparse_rows() -> None:
    ragged = as_tensor("x", Ragged(np.array([1.0, 2.0, 3.0]), np.array([0, 1, 1, 3])))
    assert ragged.to_list() == [[1.0], [], [2.0, 3.0]]
    sparse = SparseRows(np.array([5.0, 6.0]), np.array([2, 0]), np.array([0, 1, 1, 2]), 3)
    assert np.array_equal(tf.sparse.to_dense(as_tensor("x", sparse)).numpy(), sparse.dense())


@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
def test_readers_become_datasets_of_named_tuples(folder: str, make: Any) -> None:
    names = ["row", "text", "steps", "pixels"]
    with make(folder, names, num_epochs=2, cur_shard=0, shard_count=1) as reader:
        dataset = make_petastorm_dataset(reader)
        for _ in range(2):
            seen: list[int] = []
            for each in dataset:
                assert each._fields == tuple(names)
                rows = np.atleast_1d(each.row.numpy()).tolist()
                assert np.atleast_1d(each.text.numpy()).tolist() == [f"é{row}".encode() for row in rows]
                steps = each.steps.to_list() if make is make_batch_reader else [each.steps.numpy().tolist()]
                assert steps == [[row] * (row % 3) for row in rows]
                seen += rows
            assert Counter(seen) == Counter([*range(ROWS)] * 2)


def test_rows_of_empty_lists(tmp_path: Path) -> None:
    lists = pa.array([[], [], []], pa.list_(pa.int32()))
    pq.write_table(pa.table({"row": [0, 1, 2], "empty": lists}), tmp_path / "rows.parquet")
    with make_reader(str(tmp_path), ["row", "empty"], num_epochs=2) as reader:
        shapes = [(int(each.row), each.empty.shape) for each in make_petastorm_dataset(reader)]
    assert Counter(shapes) == Counter([(row, (0,)) for row in range(3)] * 2)


@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
def test_a_dataset_of_a_reader_that_was_left_early_begins_with_the_first_row(folder: str, make: Any) -> None:
    with make(folder, ["row"], num_epochs=1) as reader:
        dataset = make_petastorm_dataset(reader)
        dataset = dataset.unbatch() if reader.batched_output else dataset
        pairs = dataset.map(lambda row: (tf.cast(row.row, tf.float32)[None], 0.0)).batch(20).prefetch(2)
        model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        for _ in range(2):
            model.evaluate(pairs, steps=2, verbose=0)
        for _ in range(2):
            assert sorted(int(each[0]) for rows, _ in pairs for each in rows) == list(range(ROWS))
            next(iter(pairs))


def double(frame: Any) -> Any:
    frame["twice"] = frame["row"] * 2
    return frame


def test_readers_are_batched_over_epochs_and_transformed(folder: str) -> None:
    spec = TransformSpec(double, selected_fields=["twice"])
    with make_batch_reader(folder, ["row"], transform_spec=spec, num_epochs=2) as reader:
        batches = list(make_batched_dataset(reader, 32))
    assert [len(batch.twice) for batch in batches] == [32] * 7 + [2 * ROWS - 7 * 32]
    twice = [int(value) for batch in batches for value in batch.twice]
    assert Counter(twice) == Counter([*range(0, 2 * ROWS, 2)] * 2)
    with pytest.raises(ConfigError, match="batch_size"):
        make_batched_dataset(reader, 0)


def test_keras_trains_on_a_dataset_for_as_many_epochs(folder: str) -> None:
    loader = loader_of(folder, "drop")
    dataset = make_dataset(loader).map(lambda columns: (columns["pixels"], columns["row"]))
    keras = tf.keras
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    counted = dataset.apply(tf.data.experimental.assert_cardinality(len(loader)))
    history = model.fit(counted, epochs=3, verbose=0, shuffle=False)
    assert len(history.history["loss"]) == 3
    assert (loader.epoch, loader.state_dict()["visited"]) == (3, 0)
    model.fit(dataset.repeat(), steps_per_epoch=len(loader), epochs=2, verbose=0, shuffle=False)
    assert loader.epoch == 5


def test_keras_trains_on_an_image_folder(tmp_path: Path) -> None:
    write_images(tmp_path, 7)
    loader = Loader(files(str(tmp_path), size=(4, 6)), batch_size=3, policy="pad")
    labels: list[int] = []

    def pair(columns: Any) -> Any:
        return tf.cast(columns["image"], tf.float32) / 255.0, columns["label"], columns["weight"]

    dataset = make_dataset(loader, weights="weight").map(pair)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(loader)))
    model = tf.keras.Sequential([tf.keras.Input((4, 6, 3)), tf.keras.layers.Flatten(), tf.keras.layers.Dense(2)])
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    for image, label, weight in dataset:
        assert image.shape == (3, 4, 6, 3)
        # Each image has one value, its number, and odd numbers are in the second class.
        numbers = np.round(image.numpy()[:, 0, 0, 0] * 255).astype(int)
        assert label.numpy().tolist() == (numbers % 2).tolist()
        labels += numbers[weight.numpy() > 0].tolist()
    assert sorted(labels) == list(range(7))
    assert loader.epoch == 3


def test_lines_and_a_growing_folder_become_datasets(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text(f'{{"row": {number}, "text": "é{number}"}}\n')
    growing = Growing(str(tmp_path), format="jsonl", until=lambda paths: len(paths) == 3)
    for loader in (
        Loader(files(str(tmp_path)), batch_size=2, policy="join"),
        GrowingLoader(growing, batch_size=2),
    ):
        told = [
            (int(row), text.numpy())
            for batch in make_dataset(loader)
            for row, text in zip(*batch.values(), strict=True)
        ]
        assert sorted(told) == [(number, f"é{number}".encode()) for number in range(3)]
