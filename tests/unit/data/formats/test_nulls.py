"""Nulls and arrays of other lengths that a transform gets, and must settle."""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import FieldOptions, Loader, ParquetSource, Ragged, Reading, make_batch_reader, make_reader
from farandole.data.loading.rounds import Columns, Transform
from farandole.data.transform import TransformSpec
from farandole.errors import ConfigError, DataError


def read(folder: Path, column: pa.Array, transform: Transform, **options: Any) -> list[Any]:
    """Return the batches' columns "x" of the rows of two files: `column`, and its first row alone."""
    pq.write_table(pa.table({"x": column[:1]}), folder / "0.parquet")
    pq.write_table(pa.table({"x": column}), folder / "1.parquet")
    loader = Loader(
        ParquetSource(str(folder)), batch_size=1, policy="join", reading=Reading(transform=transform, **options)
    )
    return [batch["x"] for batch in loader]


def fill(value: object, null: Callable[[Any], Any] = np.isnan) -> Transform:
    def transform(columns: Columns) -> Columns:
        given = columns["x"]
        assert isinstance(given, np.ndarray)
        filled = given.copy()
        filled[null(given)] = value
        return {"x": filled}

    return transform


def is_none(values: Any) -> Any:
    return np.array([value is None for value in values])


FILLED: dict[str, tuple[pa.Array, Transform, list[Any]]] = {
    "integers": (pa.array([1, None, 3], pa.int32()), fill(7), [1, 7, 3]),
    "floats": (pa.array([1.5, None, 3]), fill(7), [1.5, 7, 3]),
    "decimals": (pa.array([Decimal("1.5"), None, Decimal(3)]), fill(7), [1.5, 7, 3]),
    "booleans": (pa.array([True, None, False]), fill(True, is_none), [True, True, False]),
    "texts": (pa.array(["a", None, "b"]), fill("", is_none), ["a", "", "b"]),
    "times": (
        pa.array([1, None, 3], pa.timestamp("s")),
        fill(np.datetime64(7, "s"), np.isnat),
        [np.datetime64(second, "s") for second in (1, 7, 3)],
    ),
    "items": (pa.array([[1, 2], [None, 3]], pa.list_(pa.int16())), fill(7), [[1, 2], [7, 3]]),
}


@pytest.mark.parametrize("case", FILLED)
@pytest.mark.parametrize("options", [{}, {"shuffle": False}], ids=str)
def test_nulls_reach_the_transform_which_fills_them(tmp_path: Path, case: str, options: dict[str, Any]) -> None:
    column, transform, expected = FILLED[case]
    found = read(tmp_path, column, transform, **options)
    rows = [row for batch in found for row in batch.tolist()]
    assert sorted(rows, key=str) == sorted([np.asarray(row).tolist() for row in [expected[0], *expected]], key=str)
    if case in ("integers", "items"):
        assert {batch.dtype for batch in found} == {np.dtype(np.int32 if case == "integers" else np.int16)}


def test_nulls_reach_a_transform_in_another_process(tmp_path: Path) -> None:
    found = read(tmp_path, *FILLED["integers"][:2], processes=True, workers=1)
    assert sorted(np.concatenate(found).tolist()) == [1, 1, 3, 7]


@pytest.mark.parametrize("case", ["integers", "texts", "times", "items"])
def test_nulls_that_a_transform_leaves_are_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(DataError, match=r"column 'x': the transform has left 1 nulls; .* nulls=\{'x': ...\}"):
        read(tmp_path, FILLED[case][0], lambda columns: columns)


@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
@pytest.mark.parametrize("null", [0, 1])
def test_null_arrays_that_a_spec_leaves_are_refused(tmp_path: Path, make: Any, null: int) -> None:
    if make is make_batch_reader:
        pytest.importorskip("pandas")  # the function gets frames
    rows = [None, [1, 2]] if null == 0 else [[1, 2], None]
    pq.write_table(pa.table({"x": pa.array(rows, pa.list_(pa.int64()))}), tmp_path / "0.parquet")
    spec = TransformSpec(lambda rows: rows)
    told = "column 'x': the transform has left 1 nulls beside its arrays; fill them"
    with make(f"file://{tmp_path}", transform_spec=spec) as reader, pytest.raises(DataError, match=told):
        list(reader)


def test_floats_may_keep_their_nulls_as_nan(tmp_path: Path) -> None:
    rows = np.concatenate(read(tmp_path, FILLED["floats"][0], lambda columns: columns))
    assert np.isnan(rows).sum() == 1


def test_a_transform_that_computes_keeps_its_own_type(tmp_path: Path) -> None:
    def halved(columns: Columns) -> Columns:
        return {"x": np.nan_to_num(np.asarray(columns["x"])) / 2 + 0.25}

    found = read(tmp_path, pa.array([2, None, 4]), halved)
    assert {batch.dtype for batch in found} == {np.dtype(np.float64)}


def test_integers_that_floats_do_not_hold_are_refused_beside_nulls(tmp_path: Path) -> None:
    large = 2**53 + 1
    with pytest.raises(DataError, match=r"column 'x': .*nulls beside integers beyond 2\*\*53"):
        read(tmp_path, pa.array([large, None, 3]), fill(7))
    # In another row group than the null, too.
    pq.write_table(pa.table({"x": [large, large]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"x": [1, None]}), tmp_path / "1.parquet")
    reading = Reading(transform=fill(7), lanes=2)
    loader = Loader(ParquetSource(str(tmp_path)), batch_size=4, policy="join", reading=reading)
    with pytest.raises(DataError, match=r"column 'x': has nulls beside integers beyond 2\*\*53"):
        list(loader)


def pad(columns: Columns) -> Columns:
    """Pad arrays to three items; a null becomes three of -1."""
    given: Any = columns["x"]
    rows = given.rows() if isinstance(given, Ragged) else given
    return {"x": np.stack([np.full(3, -1) if row is None else np.resize(row, 3) for row in rows])}


def test_arrays_of_other_lengths_reach_the_transform_which_pads_them(tmp_path: Path) -> None:
    for column in ([[1, 2], [3], [4, 5, 6]], [[1, 2], None, [4, 5, 6]], [[1, 2], None, [4, 5]]):
        found = np.concatenate(read(tmp_path, pa.array(column, pa.list_(pa.int64())), pad))
        expected = pad({"x": np.array([[1, 2], *column], object)})["x"]
        assert sorted(found.tolist()) == sorted(expected.tolist())  # type: ignore[union-attr]
    with pytest.raises(DataError, match="'x': the transform has left arrays of different lengths"):
        read(tmp_path, pa.array([[1, 2], [3]]), lambda columns: columns)


@pytest.mark.parametrize("fill", ["none", 1.5, float("nan"), 2**70])
def test_what_stands_for_nulls_must_fit(tmp_path: Path, fill: object) -> None:
    fields = FieldOptions(nulls={"x": fill})
    with pytest.raises(ConfigError, match=f"nulls: 'x' is int64, which cannot hold {fill!r}"):
        read(tmp_path, pa.array([1, None]), lambda columns: columns, fields=fields)
    fields = FieldOptions(nulls={"x": -1.5})
    found = read(tmp_path, pa.array([Decimal("2.25"), None]), lambda columns: columns, fields=fields)
    assert sorted(np.concatenate(found)) == [-1.5, 2.25, 2.25]


@pytest.mark.parametrize(
    ("kind", "fill", "would"),
    [
        (pa.float32(), 1e39, "inf"),
        (pa.timestamp("ms"), datetime(1999, 1, 1, 0, 0, 0, 1), "1999-01-01"),
        (pa.date32(), datetime(1999, 1, 1, 12), "1999-01-01"),
        (pa.duration("s"), timedelta(seconds=2.5), "0:00:02"),
        (pa.list_(pa.int8()), [1, 2.5], r"\[1, 2\]"),
    ],
    ids=str,
)
def test_what_stands_for_nulls_is_not_cut(tmp_path: Path, kind: pa.DataType, fill: Any, would: str) -> None:
    fields = FieldOptions(nulls={"x": fill})
    with pytest.raises(ConfigError, match=f"nulls: 'x' is .*, which cannot hold .* \\(it would become {would}"):
        read(tmp_path, pa.nulls(2, kind), lambda columns: columns, fields=fields)


@pytest.mark.parametrize(
    ("kind", "fill", "expected"),
    [
        (pa.float32(), 0.1, np.float32(0.1)),
        (pa.float32(), float("inf"), np.inf),
        (pa.timestamp("ms", "Europe/Paris"), datetime(1999, 1, 1, tzinfo=UTC), np.datetime64("1999-01-01")),
        (pa.timestamp("ns"), 5, np.datetime64(5, "ns")),
        (pa.date32(), date(1999, 1, 1), np.datetime64("1999-01-01")),
        (pa.date32(), np.datetime64("1999-01-01"), np.datetime64("1999-01-01")),
        (pa.date64(), np.datetime64("1999-01-01T00:00:00"), np.datetime64("1999-01-01")),
        (pa.timestamp("us", "Europe/Paris"), np.datetime64("1999-01-01"), np.datetime64("1999-01-01")),
        (pa.timestamp("s"), np.datetime64("1999-01-01", "ns"), np.datetime64("1999-01-01")),
        (pa.duration("ms"), np.timedelta64(2, "h"), np.timedelta64(2, "h")),
        (pa.list_(pa.int8()), [1, 2], [1, 2]),
        (pa.list_(pa.float32()), (0.1, 1), [np.float32(0.1), 1]),
    ],
    ids=str,
)
def test_what_stands_for_nulls_may_be_rounded_and_in_another_unit(
    tmp_path: Path, kind: pa.DataType, fill: Any, expected: Any
) -> None:
    # An array shows the shape of the others.
    rows = pa.array([fill, None], kind) if pa.types.is_list(kind) else pa.nulls(2, kind)
    found = read(tmp_path, rows, lambda columns: columns, fields=FieldOptions(nulls={"x": fill}))
    assert len(found) == 3 and all(np.array_equal(batch[0], expected) for batch in found)


@pytest.mark.parametrize(
    ("kind", "fill"),
    [
        (pa.timestamp("ns"), np.datetime64("9999-12-31")),  # outside the range of nanoseconds
        (pa.timestamp("ms"), np.datetime64("1999-01-01T00:00:00.0005")),
        (pa.date32(), np.datetime64("1999-01-01T12", "h")),
        (pa.timestamp("s"), np.datetime64("NaT", "s")),
        (pa.duration("s"), np.datetime64("1999-01-01")),
        (pa.timestamp("s"), np.timedelta64(1, "s")),
        (pa.int64(), np.datetime64(1, "ns")),
        (pa.time64("us"), np.timedelta64(1, "s")),
    ],
    ids=str,
)
def test_times_of_numpy_that_a_column_cannot_hold_are_refused(tmp_path: Path, kind: pa.DataType, fill: Any) -> None:
    fields = FieldOptions(nulls={"x": fill})
    with pytest.raises(ConfigError, match=r"'x' is .*, which cannot hold (np|numpy)\.\w+64\(.*\) \(it"):
        read(tmp_path, pa.nulls(2, kind), lambda columns: columns, fields=fields)


def test_a_transform_of_frames_fills_nulls_as_in_pandas(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    table = {"age": [1, None, 3], "city": ["a", None, "b"], "tags": [[1.0], None, [2.0, 3.0]]}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")

    def filled(frame: Any) -> Any:
        frame["tags"] = [[] if tags is None else list(tags) for tags in frame["tags"]]
        return frame.fillna({"age": frame["age"].max(), "city": "nowhere"})

    with make_batch_reader(str(tmp_path), transform_spec=TransformSpec(filled), shuffle_row_groups=False) as reader:
        (batch,) = reader
    assert batch.age.tolist() == [1, 3, 3] and batch.age.dtype == np.int64
    assert batch.city.tolist() == ["a", "nowhere", "b"]
    assert [tags.tolist() for tags in batch.tags] == [[1.0], [], [2.0, 3.0]]
