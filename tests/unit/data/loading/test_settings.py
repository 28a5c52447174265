"""Arguments that make no loader, reader or choice of rows: refused by name, before anything is read."""

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import (
    FeedLoader,
    Growing,
    GrowingLoader,
    Loader,
    ParquetSource,
    Reading,
    SelectedSource,
    make_batch_reader,
)
from farandole.data.formats.row_groups import RowGroup
from farandole.errors import ConfigError, DataError


class Closed(ParquetSource):
    """A source that must not be read."""

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        raise AssertionError("read before its settings were checked")


@pytest.fixture
def source(tmp_path: Path) -> Closed:
    pq.write_table(pa.table({"age": [1, 2, 3], "name": ["a", "b", "c"]}), tmp_path / "a.parquet")
    return Closed(str(tmp_path))


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("batch_size: must be >= 1, got 0", {"batch_size": 0}),
    ("batch_size: must be >= 1, got -1", {"batch_size": -1}),
    ("batch_size: must be an integer, got 1.5", {"batch_size": 1.5}),
    ("batch_size: must be an integer, got '3'", {"batch_size": "3"}),
    ("batch_size: must be an integer, got None", {"batch_size": None}),
    ("batch_size: must be an integer, got True", {"batch_size": True}),
    ("policy: must be one of drop, pad, join, got 'all'", {"policy": "all"}),
    ("columns: must be a list of names, got 'age'", {"columns": "age"}),
    ("columns: must be a list of names", {"columns": [3]}),
    ("rank: must be an integer", {"rank": "0"}),
    (r"rank: must be in 0\.\.1, got 2", {"rank": 2, "size": 2}),
    ("size: must be >= 1", {"size": 0}),
]


@pytest.mark.parametrize(("text", "given"), WRONG, ids=lambda value: str(value))
@pytest.mark.parametrize("make", [Loader, FeedLoader, GrowingLoader])
def test_arguments_of_loaders(
    source: Closed, make: Callable[..., Loader], text: str, given: dict[str, Any], tmp_path: Path
) -> None:
    rows: Any = Growing(tmp_path / "nowhere") if make is GrowingLoader else source
    with pytest.raises(ConfigError, match=text):
        make(rows, **({"batch_size": 1, "policy": "join"} | given))
    with pytest.raises(ConfigError, match="got 'x'"):
        make("x", batch_size=1, policy="join")


def test_numbers_of_numpy_are_numbers(source: Closed) -> None:
    assert len(Loader(source, batch_size=np.int64(2), policy="join", rank=np.int32(0))) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *[(name, value) for name in ("seed", "workers", "ahead") for value in (None, "2", 1.5)],
        *[(name, 1.5) for name in ("lanes", "window")],
        ("timeout", None),
        ("transform", 3),
        ("fields", {}),
    ],
)
def test_settings_of_reading(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{setting}: must be"):
        Reading(**{setting: value})


@pytest.mark.parametrize(
    "where",
    [
        *(None, 5, [], [[]], "age > 1", ["age"], [("age", ">")], [("age", "~", 1)], [(1, ">", 2)], {"age": 1}),
        *([("age", "in", 3)], [("name", "in", "a")], [[("age", ">", 1)], ("age", "<", 1)], [("age", ["="], 1)]),
    ],
    ids=repr,
)
def test_what_is_no_condition(source: Closed, where: Any) -> None:
    with pytest.raises(ConfigError, match="where: "):
        SelectedSource(source, where)


@pytest.mark.parametrize(
    ("name", "operator", "value"),
    [("age", ">", "x"), ("age", "==", "1"), ("name", "=", 1), ("age", "=", object()), ("age", "in", ["x"])],
)
def test_values_that_a_column_cannot_be_compared_with(source: Closed, name: str, operator: str, value: object) -> None:
    with pytest.raises(DataError, match=f"column '{name}': is .*, and cannot be compared: {operator} "):
        SelectedSource(source, [[("age", ">", 1)], [(name, operator, value)]])


def test_times_with_a_zone_are_not_compared_with_times_without(tmp_path: Path) -> None:
    times = pa.array([0], pa.timestamp("us", "Europe/Berlin"))
    pq.write_table(pa.table({"at": times}), tmp_path / "times.parquet")
    with pytest.raises(DataError, match=r"column 'at': is .*, and cannot be compared: > .*timezone"):
        SelectedSource(ParquetSource(str(tmp_path)), [("at", ">", datetime(2024, 1, 1))])


def test_conditions_may_be_lists_and_values_any_collection(tmp_path: Path) -> None:
    pq.write_table(pa.table({"age": [1, 2, 3]}), tmp_path / "a.parquet")
    source = ParquetSource(tmp_path)
    for where in ([["age", ">", 1]], [[["age", ">", 1]]], [("age", "in", (age for age in (2, 3)))], (("age", ">", 1),)):
        assert sum(group.rows for group in SelectedSource(source, where).row_groups) == 2  # type: ignore[arg-type]


def test_arguments_of_readers(source: Closed, tmp_path: Path) -> None:
    url = str(tmp_path)
    for text, given in {"num_epochs": {"num_epochs": "3"}, "schema_fields": {"schema_fields": "age"}}.items():
        with pytest.raises(ConfigError, match=text):
            make_batch_reader(url, **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="schema_fields: must be a list"):
        make_batch_reader(url, [3])
