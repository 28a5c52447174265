"""Columns that the names of folders define, and columns of the same name in files."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import Loader, ParquetSource
from farandole.errors import DataError
from helpers.datasets import write_rows


def write(folder: Path, held: dict[str, pa.Array]) -> None:
    """Write a file with column "x" into each of the folders."""
    for name, values in held.items():
        (folder / name).mkdir()
        pq.write_table(pa.table({"row": range(len(values)), "x": values}), folder / name / "a.parquet")


@pytest.mark.parametrize(
    ("folders", "kind"),
    [
        (("x=1", "x=02"), pa.int32()),
        (("x=1", "x=02"), pa.string()),
        (("x=a%20b", "x=c"), pa.dictionary(pa.int8(), pa.string())),
        (("x=2024-01-01", "x=2024-01-02"), pa.date32()),
        (("x=0.1", "x=2.50"), pa.float32()),
        (("x=0.1", "x=2.50"), pa.decimal128(9, 2)),
        (("x=true", "x=__HIVE_DEFAULT_PARTITION__"), pa.bool_()),
    ],
    ids=str,
)
def test_a_column_of_files_and_folders_has_the_values_of_both(
    tmp_path: Path, folders: tuple[str, ...], kind: pa.DataType
) -> None:
    texts = {"x=a%20b": "a b", "x=__HIVE_DEFAULT_PARTITION__": None}
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    held = {each: pa.array([texts.get(each, each[2:])] * 3).cast(plain).cast(kind) for each in folders}
    write(tmp_path, held)
    source = ParquetSource(str(tmp_path))
    assert source.schema.names == ["row", "x"]
    read = [value for group in source.row_groups for value in source.read(group, ["x"])["x"].to_pylist()]
    assert sorted(map(str, read)) == sorted(str(value) for each in held.values() for value in each.to_pylist())


@pytest.mark.parametrize(
    ("value", "told"),
    [(7, "is 7 in .*a.parquet, but '1' in the name of a folder"), ("y", "is 'y' in"), (None, "is None in")],
)
def test_a_value_that_differs_from_the_folders_is_an_error(tmp_path: Path, value: Any, told: str) -> None:
    kind = pa.string() if isinstance(value, str) else pa.int64()
    write(tmp_path, {"x=1": pa.array(["1", "1", value] if kind == pa.string() else [1, 1, value], kind)})
    source = ParquetSource(str(tmp_path))
    with pytest.raises(DataError, match=told):
        list(Loader(source, batch_size=3, policy="join", columns=["x"]))
    (batch,) = Loader(source, batch_size=3, policy="join", columns=["row"])
    assert sorted(batch["row"].tolist()) == [0, 1, 2]


def test_a_folder_whose_name_is_no_value_of_the_column_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"x=abc": pa.array([1, 1])})
    source = ParquetSource(str(tmp_path))
    with pytest.raises(DataError, match=r"is 1 in .*a\.parquet, but 'abc' in the name of a folder; rename"):
        source.read(source.row_groups[0], ["x"])


def test_files_without_the_column_get_it_from_their_folders(tmp_path: Path) -> None:
    write_rows(tmp_path / "x=1", [[3]])
    source = ParquetSource(str(tmp_path))
    assert source.read(source.row_groups[0], ["x"])["x"].to_pylist() == [1] * 3
