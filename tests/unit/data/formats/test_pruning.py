"""Row groups that are not read because their files say that nothing in them can match."""

import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farandole.data import CachedSource, ParquetSource, SelectedSource
from farandole.data.formats.pruning import Bounds, Condition
from farandole.data.formats.row_groups import RowGroup

DAY = datetime.date(2024, 1, 1)
# Few values of each type, so that conditions often meet the least and the greatest of a row group.
KINDS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int": (pa.int64(), [-(2**62), -1, 0, 1, 7, 2**53 + 1]),
    "small": (pa.uint8(), [0, 1, 200, 255]),
    "float": (pa.float64(), [-math.inf, -0.0, 0.0, 0.1, 1.5, math.nan]),
    "half": (pa.float32(), [-1.0, 0.1, 0.25, math.nan, math.inf]),
    "text": (pa.string(), ["", "a", "ab", "b", "é", "z" * 99]),
    "flag": (pa.bool_(), [True, False]),
    "day": (pa.date32(), [DAY, DAY + datetime.timedelta(days=40)]),
    "time": (pa.timestamp("us"), [datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 1, 0, 0, 0, 1)]),
}
OPERATORS = ["=", "==", "!=", "<", "<=", ">", ">=", "in", "not in"]


class Counting(ParquetSource):
    """Counts what is read."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.reads: list[int] = []

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        self.reads.append(row_group.number)
        return super().read(row_group, columns)


class Unbounded(ParquetSource):
    """Knows no bounds."""

    def bounds(self, column: str) -> Bounds | None:
        return None


@st.composite
def conditions(draw: st.DrawFn) -> Condition:
    name = draw(st.sampled_from(list(KINDS)))
    operator = draw(st.sampled_from(OPERATORS))
    values = st.sampled_from(KINDS[name][1])
    return name, operator, draw(st.lists(values, min_size=1, max_size=3) if "in" in operator else values)


def cells(kind: str) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), st.sampled_from(KINDS[kind][1]))


row_groups = st.lists(st.fixed_dictionaries({name: cells(name) for name in KINDS}), min_size=1, max_size=4)


@settings(max_examples=50)
@given(
    groups=st.lists(row_groups, min_size=1, max_size=4),
    branches=st.lists(st.lists(conditions(), min_size=1, max_size=2), min_size=1, max_size=2),
)
@example(
    groups=[[dict.fromkeys(KINDS)], [{name: values[0] for name, (_, values) in KINDS.items()}]],
    branches=[[("half", "in", [0.1]), ("float", "!=", math.nan)]],
)
def test_pruning_changes_no_choice(groups: list[list[dict[str, Any]]], branches: list[list[Condition]]) -> None:
    schema = pa.schema([(name, kind) for name, (kind, _) in KINDS.items()] + [("row", pa.int64())])
    rows = 0
    with TemporaryDirectory() as folder:
        with pq.ParquetWriter(Path(folder, "a.parquet"), schema) as writer:
            for group in groups:
                numbered = [{**cells, "row": rows + place} for place, cells in enumerate(group)]
                writer.write_table(pa.Table.from_pylist(numbered, schema))
                rows += len(group)
        chosen = [
            [row for group in selected.row_groups for row in selected.read(group, ["row"])["row"].to_pylist()]
            for selected in (SelectedSource(kind(folder), branches) for kind in (ParquetSource, Unbounded))
        ]
        expected = pq.read_table(Path(folder, "a.parquet")).filter(pq.filters_to_expression(branches))
    assert chosen[0] == chosen[1] == expected["row"].to_pylist()


@pytest.mark.parametrize(
    ("where", "read"),
    [
        ([("row", ">=", 25), ("row", "<", 31)], [2, 3]),
        ([[("row", "==", 3)], [("row", "in", {41, 42})]], [0, 4]),
        ([("row", ">", 100)], []),
        ([("row", "!=", 7)], [0, 1, 2, 3, 4]),
        ([("same", "!=", 3)], [0, 1, 2, 4]),
        ([("name", "=", "n03")], [0]),
        ([("nothing", "<", 5)], []),
        ([("row", "<", 20), ("year", "=", 2024)], [0, 1]),
        ([("row", "<", 20), ("year", "=", 2023)], []),
    ],
)
def test_only_row_groups_that_may_match_are_read(tmp_path: Path, where: Any, read: list[int]) -> None:
    table = pa.table(
        {
            "row": range(50),
            "same": [row // 10 for row in range(50)],
            "name": [f"n{row:02}" for row in range(50)],
            "nothing": pa.nulls(50, pa.int64()),
        }
    )
    (tmp_path / "year=2024").mkdir()
    pq.write_table(table, tmp_path / "year=2024" / "a.parquet", row_group_size=10)
    source = Counting(str(tmp_path))
    SelectedSource(CachedSource(source, tmp_path / "cache", 1 << 20), where)
    assert sorted(source.reads) == read


def test_what_is_chosen_from_a_choice_is_pruned_by_its_bounds(tmp_path: Path) -> None:
    pq.write_table(pa.table({"row": range(50)}), tmp_path / "a.parquet", row_group_size=10)
    source = Counting(str(tmp_path))
    first = SelectedSource(source, [("row", ">=", 20)])
    source.reads.clear()
    second = SelectedSource(first, [("row", "<", 33)])
    assert sorted(source.reads) == [2, 3]
    assert [row for group in second.row_groups for row in second.read(group, ["row"])["row"].to_pylist()] == [
        *range(20, 33)
    ]


NOON = datetime.datetime(2024, 1, 1, 12, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("kind", "rows", "condition", "expected"),
    [
        (pa.timestamp("ms", "Asia/Tokyo"), [NOON, None], ("x", "in", [NOON]), [0]),
        (pa.date32(), [DAY, None], ("x", "in", ["2024-01-01"]), [0]),
        (pa.uint64(), [0, 7, 2**63, None, 2**64 - 1], ("x", ">", 7), [2, 4]),
        (pa.uint64(), [0, 7, 2**63, None, 2**64 - 1], ("x", "==", 2**64 - 1), [4]),
        (pa.uint64(), [0, 7, 2**63, None, 2**64 - 1], ("x", "in", {7, 2**63}), [1, 2]),
    ],
)
def test_values_that_arrow_does_not_compare_with_bounds(
    tmp_path: Path, kind: pa.DataType, rows: list[Any], condition: Condition, expected: list[int]
) -> None:
    table = pa.table({"x": pa.array(rows, kind), "row": range(len(rows))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    chosen = SelectedSource(ParquetSource(str(tmp_path)), [condition])
    found = [row for group in chosen.row_groups for row in chosen.read(group, ["row"])["row"].to_pylist()]
    assert found == expected
