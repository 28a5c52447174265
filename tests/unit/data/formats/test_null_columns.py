"""Columns without a value in some files, to which writers give Arrow's type null."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import ArrowSource, FieldOptions, Loader, ParquetSource, Reading, SelectedSource, Source
from farandole.errors import DataError
from helpers.tables import rows_of

VALUES: dict[str, list[Any]] = {"number": [1, 2], "text": ["a", "b"], "list": [[1.5], [2.5]], "flag": [True, False]}


@pytest.fixture(params=["parquet", "arrow"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    """Four files: the first and the third have no value in any column but the first."""
    for part in range(4):
        columns = {"id": [part * 2, part * 2 + 1]}
        columns |= {name: pa.nulls(2) if part % 2 == 0 else values for name, values in VALUES.items()}
        table = pa.table(columns)
        if request.param == "parquet":
            pq.write_table(table, tmp_path / f"part-{part}.parquet")
        else:
            with pa.ipc.new_file(tmp_path / f"part-{part}.arrow", table.schema) as writer:
                writer.write_table(table)
    return ParquetSource(str(tmp_path)) if request.param == "parquet" else ArrowSource(str(tmp_path))


def test_such_a_column_holds_nulls_of_the_type_that_it_has_elsewhere(source: Source) -> None:
    assert {name: str(source.schema.field(name).type) for name in VALUES} == {
        "number": "int64",
        "text": "string",
        "list": "list<element: double>" if isinstance(source, ParquetSource) else "list<item: double>",
        "flag": "bool",
    }
    rows = rows_of(source, ["id", *VALUES])
    assert rows[("0", "None", "None", "None", "None")] == 1
    assert rows[("2", "1", "'a'", "[1.5]", "True")] == 1
    for group in source.row_groups:
        assert source.read(group, ["text", "number"]).schema.types == [pa.string(), pa.int64()]


def test_its_nulls_are_filled_as_others_are(source: Source) -> None:
    fields = FieldOptions(nulls={"number": -1})
    loader = Loader(source, batch_size=3, policy="join", columns=["id", "number"], reading=Reading(fields=fields))
    seen = Counter(
        pair for batch in loader for pair in zip(batch["id"].tolist(), batch["number"].tolist(), strict=True)
    )  # type: ignore[union-attr]
    assert seen == Counter({(0, -1): 1, (1, -1): 1, (2, 1): 1, (3, 2): 1, (4, -1): 1, (5, -1): 1, (6, 1): 1, (7, 2): 1})
    with pytest.raises(DataError, match="2 of 2 rows are null"):
        list(Loader(source, batch_size=3, policy="join", columns=["number"]))


def test_conditions_find_the_values_that_there_are(source: Source) -> None:
    assert set(rows_of(SelectedSource(source, [("number", ">", 1)]), ["id"])) == {("3",), ("7",)}


def test_other_types_still_differ(tmp_path: Path) -> None:
    for name, values in (("a", pa.nulls(1)), ("b", ["text"]), ("c", [1])):
        pq.write_table(pa.table({"value": values}), tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=r"'value': is string in .*b\.parquet, but int64 in .*c\.parquet"):
        Loader(ParquetSource(str(tmp_path)), batch_size=1, policy="join")
