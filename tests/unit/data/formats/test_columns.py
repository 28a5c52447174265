"""Columns that no tensor holds, or that differ between files, beside columns that are read."""

import logging
import time
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import ArrowSource, Loader, ParquetSource, SelectedSource, Source, make_batch_reader, make_reader
from farandole.errors import DataError

UNHELD = {
    "place": pa.array([{"x": 1, "y": 2.0}] * 3),
    "tags": pa.array([["a"], [], ["b", "c"]]),
    "prices": pa.array([[("a", 1)]] * 3, pa.map_(pa.string(), pa.int64())),
}


def rows(source: Source, columns: list[str] | None = None) -> list[int]:
    loader = Loader(source, batch_size=9, policy="join", columns=columns)
    return sorted(row for batch in loader for row in batch["id"].tolist())  # type: ignore[union-attr]


def test_columns_that_no_tensor_holds_are_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": [1, 2, 3], "label": ["a", "b", "c"], **UNHELD}), path)
    for make, fields in ((make_batch_reader, None), (make_batch_reader, ["id", ".*l"]), (make_reader, None)):
        caplog.clear()
        with make(str(path), fields) as reader:
            assert set(next(iter(reader))._fields) == {"id", "label"}
        warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert len(warned) == 1 and warned[0].startswith(
            "columns that no tensor holds are left out: place (struct<x: int64, y: double>), "
            "tags (list<element: string>), prices (map<string, int64"
        )
    caplog.clear()
    second = Loader(ParquetSource(str(path)), batch_size=1, policy="join", rank=1, size=2)
    assert list(second.kinds) == ["id", "label"] and "left out" not in caplog.text


@pytest.mark.parametrize("name", UNHELD)
def test_they_are_refused_by_name(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.table({"id": [1, 2, 3], **UNHELD}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=f"column '{name}': no tensor holds"):
        make_batch_reader(str(tmp_path), ["id", name])
    pq.write_table(pa.table(UNHELD), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="no tensor holds any column: place"):
        Loader(ParquetSource(str(tmp_path)), batch_size=1, policy="join")


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_columns_that_differ_between_files_matter_only_if_they_are_read(tmp_path: Path, form: str) -> None:
    first = {"id": [1, 2], "kind": ["a", "b"], "first": [1, 1]}
    # Another order of columns, too.
    second = {"second": [1.5], "kind": [3], "id": [3]}
    for number, columns in enumerate((first, second)):
        if form == "parquet":
            pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet")
        else:
            with pa.ipc.new_file(tmp_path / f"{number}.arrow", pa.table(columns).schema) as writer:
                writer.write_table(pa.table(columns))
    source = ParquetSource(str(tmp_path)) if form == "parquet" else ArrowSource(str(tmp_path))
    assert rows(source, ["id"]) == [1, 2, 3]
    assert rows(SelectedSource(source, [("id", "<", 3)]), ["id"]) == [1, 2]
    problems = {
        "kind": f"is string in .*0.{form}, but int64 in .*1.{form}",
        "first": f"is in .*0.{form}, but not in .*1.{form}",
        "second": f"is in .*1.{form}, but not in .*0.{form}",
    }
    for name, problem in problems.items():
        with pytest.raises(DataError, match=f"column '{name}': {problem}"):
            rows(source, ["id", name])
        with pytest.raises(DataError, match=f"column '{name}': {problem}"):
            rows(SelectedSource(source, [(name, "=", 1 if name != "kind" else "a")]), ["id"])
    with pytest.raises(DataError, match=r"0\..*1\."):
        rows(source)


def seconds_to_open(folder: Path, columns: int) -> float:
    """Return the processor time of opening a table of so many columns in two files, and of planning them."""
    for number in range(2):  # whose columns differ in the width of their integers
        kind = pa.int64() if number else pa.int32()
        table = pa.table({f"c{column}": pa.array([1, 2], kind) for column in range(columns)})
        pq.write_table(table, folder / f"{columns}-{number}.parquet")
    took = []
    for _ in range(2):
        began = time.process_time()
        Loader(ParquetSource(str(folder / f"{columns}-*.parquet")), batch_size=1, policy="join")
        took.append(time.process_time() - began)
    return min(took)


def test_the_time_of_opening_grows_with_the_number_of_columns_and_no_faster(tmp_path: Path) -> None:
    narrow, wide = seconds_to_open(tmp_path, 150), seconds_to_open(tmp_path, 1500)
    assert wide < 25 * narrow  # a search for each column makes it 70 to 100 times
