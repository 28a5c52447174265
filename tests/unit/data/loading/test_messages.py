"""Sentences that readers of data give to people."""

import logging
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import Loader, ParquetSource, Reading
from farandole.data.formats.fields import Arrays, Vectors
from farandole.errors import DataError


@pytest.fixture
def source(tmp_path: Path) -> ParquetSource:
    pq.write_table(pa.table({"id": [1, 2, 3], "x": [1, 2, 3]}), tmp_path / "rows.parquet")
    return ParquetSource(str(tmp_path))


def test_an_error_about_all_columns_names_none(source: ParquetSource, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^3 rows make no step of 32; take a smaller batch_size") as refused:
        Loader(source, batch_size=32, policy="drop")
    assert refused.value.column == ""
    with pytest.raises(DataError, match=r"^3 rows for 4 ranks: some have none to repeat"):
        Loader(source, batch_size=1, policy="pad", size=4)
    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"^there are no rows"):
        Loader(ParquetSource(str(tmp_path / "none.parquet")), batch_size=1, policy="join")


def test_lengths_that_are_equal_are_told_once() -> None:
    field = Arrays(name="pixels", kind="int64[2]", shape=(2,))
    with pytest.raises(DataError, match="arrays of 3 items where the first rows have 2"):
        field.values(pa.chunked_array([[[1, 2, 3], [4, 5, 6]]]))
    with pytest.raises(DataError, match="arrays of 1 to 3 items where the first rows have 2"):
        field.values(pa.chunked_array([[[1, 2, 3], [4]]]))
    kinds = pa.struct(
        {"type": pa.int8(), "size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float64())}
    )
    rows = [{"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]}]
    with pytest.raises(DataError, match="vectors of 3 where the first has 2"):
        Vectors(name="v", kind="float64[2]", width=2, sparse=False).values(pa.chunked_array([pa.array(rows, kinds)]))


def test_a_warning_about_the_data_comes_from_rank_0(source: ParquetSource, caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(3):
        with caplog.at_level(logging.WARNING):
            Loader(source, batch_size=1, policy="join", rank=rank, size=3, reading=Reading(lanes=1))
    assert [record.message.split(":")[0] for record in caplog.records] == ["1 row groups for 3 ranks"]
