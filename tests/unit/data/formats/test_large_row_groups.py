"""Large row groups of Parquet files, which are decoded in parts: the rows are those of a row group read at once."""

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import FieldOptions, Loader, ParquetSource, Reading
from farandole.data.formats import parquet_files
from farandole.data.formats.fields import Numbers
from farandole.data.formats.row_groups import RowGroup
from farandole.data.loading.values import Ragged
from farandole.errors import DataError, SourceError

ROWS = 1000
IDS = [Numbers(name="id", kind="int64")]


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of 4 KiB are large, and parts have about 2 KiB."""
    monkeypatch.setattr(parquet_files, "_LARGE_GROUP", 4 << 10)
    monkeypatch.setattr(parquet_files, "_PART_BYTES", 2 << 10)


def table(rows: int = ROWS) -> pa.Table:
    items = np.arange(rows * 4, dtype=np.float32)
    return pa.table(
        {
            "id": pa.array(range(rows)),
            "maybe": pa.array([None if row % 7 == 0 else row for row in range(rows)]),
            "text": pa.array([f"row {row}" for row in range(rows)]),
            "fixed": pa.FixedSizeListArray.from_arrays(pa.array(items), 4),
            "list": pa.array(items.reshape(rows, 4).tolist()),
            "ragged": pa.array([list(range(row % 5)) for row in range(rows)]),
            "nested": pa.array([[[row], [-row]] for row in range(rows)]),
            "when": pa.array(np.arange(rows), pa.timestamp("ms")),
        }
    )


def write(path: Path, content: pa.Table, rows: int = ROWS, **options: object) -> ParquetSource:
    pq.write_table(content, path, row_group_size=rows, **options)
    return ParquetSource(str(path))


def rows_of(source: ParquetSource, **reading: object) -> dict[str, list[object]]:
    fields = FieldOptions(nulls={"maybe": -1}) if "maybe" in source.schema.names else FieldOptions()
    asked = Reading(shuffle=False, fields=fields, **reading)  # type: ignore[arg-type]
    found: dict[str, list[object]] = {}
    for batch in Loader(source, batch_size=37, policy="join", reading=asked):
        for name, values in batch.items():
            rows = values.rows() if isinstance(values, Ragged) else values
            found.setdefault(name, []).extend(np.asarray(row).tolist() for row in rows)
    return found


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_the_rows_are_those_of_the_file(tmp_path: Path, memory: int) -> None:
    source = write(tmp_path / "a.parquet", table(), rows=600)
    parts = list(source.parts(source.row_groups[0], IDS))
    assert len(parts) > 1
    found, expected = rows_of(source, memory=memory), table().to_pydict()
    expected["maybe"] = [-1 if value is None else value for value in expected["maybe"]]
    assert found.pop("when") == [value.replace(tzinfo=None) for value in expected.pop("when")]
    assert found == expected


def test_folders_still_name_columns(tmp_path: Path) -> None:
    for day in range(2):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(table(), tmp_path / f"day={day}" / "a.parquet")
    assert rows_of(ParquetSource(str(tmp_path)))["day"] == [0] * ROWS + [1] * ROWS


def test_lengths_that_differ_in_a_later_part_make_a_ragged_column(tmp_path: Path) -> None:
    lists = [[1.0, 2.0]] * (ROWS - 1) + [[3.0]]
    assert rows_of(write(tmp_path / "a.parquet", pa.table({"x": lists})))["x"] == lists


def test_nulls_that_appear_in_a_later_part_reach_a_transform(tmp_path: Path) -> None:
    numbers = [*range(ROWS - 1), None]
    source = write(tmp_path / "a.parquet", pa.table({"x": pa.array(numbers)}), use_dictionary=False)

    def fill(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"x": np.where(np.isnan(columns["x"].astype(float)), -5, columns["x"]).astype(np.int64)}

    assert rows_of(source, transform=fill)["x"] == [*range(ROWS - 1), -5]


def test_nulls_without_a_value_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a.parquet", pa.table({"x": pa.array([*range(ROWS - 1), None])}))
    with pytest.raises(DataError, match=r"a\.parquet.*null"):
        rows_of(source)


def test_a_subclass_with_its_own_read_is_asked_for_whole_row_groups(tmp_path: Path) -> None:
    class Doubled(ParquetSource):
        def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
            found = super().read(row_group, columns)
            return pa.table({name: [2 * value for value in found[name].to_pylist()] for name in columns})

    write(tmp_path / "a.parquet", pa.table({"x": range(ROWS)}))
    assert rows_of(Doubled(str(tmp_path / "a.parquet")))["x"] == [2 * row for row in range(ROWS)]


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    source = write(tmp_path / "a.parquet", table())
    parts = source.parts(source.row_groups[0], IDS)
    next(parts)
    pq.write_table(table(ROWS + 1), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a\.parquet"):
        list(parts)
