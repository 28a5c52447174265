"""Batches as JAX arrays."""

import os
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa

from farandole.data import FieldOptions, Loader, ParquetSource, Ragged, Reading, SparseRows, Values, files
from farandole.data.loading.values import empty_aligned
from farandole.errors import DataError
from helpers.datasets import RAGGED, write_images, write_rows

jax = pytest.importorskip("jax")

from farandole.jax.adapter import allow_64_bits  # noqa: E402  # after the module that it needs is known to be there
from farandole.jax.data import TensorLoader, as_tensor  # noqa: E402

ROWS = 122


def rows_of_kinds(first: int, rows: int) -> pa.Table:
    numbers = list(range(first, first + rows))
    return pa.table(
        {
            "row": pa.array(numbers, pa.int32()),
            "big": [number << 32 for number in numbers],
            "flag": [number % 2 == 0 for number in numbers],
            "pixels": pa.array([[number, -number] for number in numbers], pa.list_(pa.float32(), 2)),
            "city": [f"c{number % 3}" for number in numbers],
            "price": pa.array([Decimal(number) for number in numbers], pa.decimal128(9, 2)),
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> str:
    write_rows(tmp_path / "data", RAGGED["ragged"], rows_of_kinds)
    return str(tmp_path / "data")


def test_every_row_once_and_an_epoch_that_goes_on(folder: str) -> None:
    fields = FieldOptions(vocabulary={"city": ["c0", "c1", "c2"]})
    columns = ["row", "flag", "pixels", "city"]
    seen: list[int] = []
    for rank in range(3):
        loader, other = (
            Loader(
                ParquetSource(folder),
                batch_size=8,
                policy="join",
                rank=rank,
                size=3,
                columns=columns,
                reading=Reading(fields=fields),
            )
            for _ in range(2)
        )
        for made in (TensorLoader(loader), TensorLoader(other, jax.devices()[0])):
            if made.loader is other:
                made.load_state_dict(loader.state_dict())
            for step, batch in enumerate(made):
                assert all(isinstance(array, jax.Array) for array in batch.values())
                rows = batch["row"].tolist()
                assert batch["pixels"].tolist() == [[row, -row] for row in rows]
                assert batch["flag"].tolist() == [row % 2 == 0 for row in rows]
                assert batch["city"].tolist() == [row % 3 for row in rows]
                assert batch.rows == len(rows)
                seen += rows
                if made.loader is loader and step == 1:
                    break
    assert Counter(seen) == Counter(range(ROWS))


def test_arrays_may_be_donated_and_outlive_their_batch() -> None:
    values = empty_aligned((256, 64), np.dtype(np.float32))
    values[:] = 1
    array = as_tensor("x", values)
    values[:] = 7
    added = jax.jit(lambda given: given + 1, donate_argnums=0)(array)
    assert array.is_deleted()
    assert (np.asarray(added) == 2).all() and (values == 7).all()


def test_64_bits_become_32_with_a_warning_unless_that_loses_numbers(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = Loader(ParquetSource(folder), batch_size=8, policy="drop", columns=["big", "row", "price"])
    with pytest.raises(DataError, match=r"^column 'big': \d+ to \d+ do not fit into int32; set jax_enable_x64"):
        list(TensorLoader(loader))
    assert "big (int64), price (decimal128(9, 2)): 64 bits become 32, unless jax_enable_x64 is set" in caplog.text
    assert as_tensor("x", np.arange(3.0)).dtype == np.float32
    with allow_64_bits():
        assert as_tensor("x", np.array([1 << 40])).tolist() == [1 << 40]


@pytest.mark.parametrize(
    "values",
    [np.array([1.0, -1e39]), np.array([1e39j]), SparseRows(np.array([1e39]), np.array([0]), np.array([0, 1]), 1)],
)
def test_numbers_beyond_32_bits_are_refused(values: Values) -> None:
    with pytest.raises(DataError, match=r"^column 'x': numbers do not fit into \w+; set jax_enable_x64"):
        as_tensor("x", values)
    with allow_64_bits():
        as_tensor("x", values)


def test_infinities_and_small_numbers_are_no_overflow() -> None:
    assert as_tensor("x", np.array([np.inf, -np.inf, 1e-60])).tolist() == [np.inf, -np.inf, 0]


def test_places_beyond_32_bits_are_refused() -> None:
    sparse = SparseRows(np.array([5.0]), np.array([1 << 40]), np.array([0, 1]), 1 << 41)
    with pytest.raises(DataError, match=r"^column 'x': 0 to 1099511627776 do not fit into int32"):
        as_tensor("x", sparse)
    with allow_64_bits():
        assert as_tensor("x", sparse).indices.tolist() == [[0, 1 << 40]]


def test_arrays_of_other_dtypes_and_places_name_the_column() -> None:
    assert as_tensor("x", np.array([1, 2], ">i4")).tolist() == [1, 2]
    for letters in (np.array(["a"]), np.array([b"a"])):
        with pytest.raises(DataError, match="column 'x': texts and bytes have no array"):
            as_tensor("x", letters)
    with pytest.raises(DataError, match="column 'x': JAX refuses 1 rows of "):
        as_tensor("x", np.array([1], np.longdouble))


def test_rows_that_a_sharding_cannot_divide() -> None:
    program = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from farandole.jax.data import as_tensor
halves = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
assert len(as_tensor("x", np.arange(4), halves).addressable_shards) == 2
as_tensor("x", np.arange(3), halves)
"""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert "DataError: column 'x': JAX refuses 3 rows" in ended.stderr and "policy 'pad' or 'drop'" in ended.stderr


def test_what_jax_cannot_hold_is_refused_before_the_first_batch(folder: str) -> None:
    loader = Loader(ParquetSource(folder), batch_size=8, policy="drop")
    with pytest.raises(DataError, match="column 'city': texts and bytes have no array; give a vocabulary"):
        TensorLoader(loader)
    with pytest.raises(DataError, match="column 'x': JAX has no arrays of different lengths"):
        as_tensor("x", Ragged(np.array([1.0]), np.array([0, 0, 1])))
    sparse = SparseRows(np.array([5.0, 6.0]), np.array([2, 0]), np.array([0, 1, 1, 2]), 3)
    assert np.array_equal(as_tensor("x", sparse).todense(), sparse.dense())
    days = as_tensor("day", np.array(["1970-01-03"], "datetime64[D]"))
    assert days.tolist() == [2]


def test_an_image_folder_trains_a_jitted_step(tmp_path: Path) -> None:
    write_images(tmp_path, 7)
    loader = TensorLoader(Loader(files(str(tmp_path), size=(4, 6)), batch_size=3, policy="pad"))
    step = jax.jit(lambda image, label: (image[:, 0, 0, 0], label))
    numbers: list[int] = []
    for batch in loader:
        assert (batch["image"].shape, batch["image"].dtype) == ((3, 4, 6, 3), np.uint8)
        first, labels = step(batch["image"], batch["label"])
        assert labels.tolist() == [number % 2 for number in first.tolist()]
        numbers += first.tolist()[: batch.rows - batch.repeated]
    assert sorted(numbers) == list(range(7))
