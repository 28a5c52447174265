"""Types of columns after a `TransformSpec`."""

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import Ragged, Reading, make_batch_reader, make_reader
from farandole.data.transform import TransformSpec, edit_field, transform_schema
from farandole.errors import DataError

DAY = datetime.date(2021, 3, 1)
TYPED = {
    "f2": pa.array(np.array([1, 2], np.float16)),
    "f4": pa.array([1, None], pa.float32()),
    "i1": pa.array([1, 2], pa.int8()),
    "i4": pa.array([1, 2], pa.int32()),
    "u1": pa.array([1, 2], pa.uint8()),
    "u8": pa.array([1, 2**63], pa.uint64()),
    "flag": pa.array([True, False]),
    "day": pa.array([DAY, DAY], pa.date32()),
    "us": pa.array([1, 2], pa.timestamp("us", "UTC")),
    "ns": pa.array([1, 2], pa.timestamp("ns")),
    "span": pa.array([1, 2], pa.duration("ms")),
    "amount": pa.array([Decimal("1.5"), Decimal("2.5")]),
    "list": pa.array([[1], [2]], pa.list_(pa.int16())),
    "ragged": pa.array([[1], [2, 3]], pa.list_(pa.float32())),
    "text": pa.array(["a", "b"]),
    "blob": pa.array([b"a", b"b"]),
}


@pytest.fixture
def typed(tmp_path: Path) -> str:
    pq.write_table(pa.table(TYPED), tmp_path / "rows.parquet")
    return f"file://{tmp_path}"


def types_of(make: Any, url: str, spec: TransformSpec | None = None, **options: Any) -> dict[str, str]:
    with make(url, transform_spec=spec, **options) as reader:
        (batch,) = reader.batches()
    arrays = {name: values.values if isinstance(values, Ragged) else values for name, values in batch.items()}
    return {name: str(values.dtype) for name, values in arrays.items()}


@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
def test_a_transform_keeps_types(typed: str, make: Any) -> None:
    plain = types_of(make, typed, nulls={"f4": 0.0})
    assert types_of(make, typed, TransformSpec(lambda rows: rows)) == plain
    assert (plain["day"], plain["us"], plain["f4"]) == ("datetime64[D]", "datetime64[us]", "float32")
    some = TransformSpec(lambda rows: rows, selected_fields=["u1", "day"])
    assert types_of(make, typed, some) == {"u1": "uint8", "day": "datetime64[D]"}
    edit = [edit_field("u1", np.float32, ()), edit_field("day", "datetime64[s]", ()), edit_field("blob", np.bytes_, ())]
    edited = types_of(make, typed, TransformSpec(lambda rows: rows, edit_fields=edit, removed_fields=["text"]))
    assert edited == {name: kind for name, kind in plain.items() if name != "text"} | {
        "u1": "float32",
        "day": "datetime64[s]",
    }


def test_types_that_a_function_of_frames_makes(typed: str) -> None:
    def made(frame: pd.DataFrame) -> pd.DataFrame:
        days = pd.Series([DAY, DAY])
        return pd.DataFrame(
            {
                "half": frame["i4"] / np.float32(2),
                "small": frame["u1"] + 1,
                "nullable": frame["i4"].astype("Int16"),
                "real": pd.array([1.5, None], "Float32"),
                "flag": frame["flag"].astype("boolean"),
                "zone": frame["us"].dt.tz_localize("Europe/Rome"),
                "date": days,
                "moment": [datetime.datetime(2021, 3, 1), datetime.datetime(2021, 3, 2)],
                "kind": frame["text"].astype("category"),
                "word": frame["text"].astype("string"),
                "cells": [np.float32([1, 2]), np.float32([3, 4])],
            }
        )

    assert types_of(make_batch_reader, typed, TransformSpec(made)) == {
        "half": "float64",
        "small": "uint8",
        "nullable": "int16",
        "real": "float32",
        "flag": "bool",
        "zone": "datetime64[us]",
        "date": "datetime64[D]",
        "moment": "datetime64[ns]",
        "kind": "object",
        "word": "object",
        "cells": "float32",
    }


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"i4": pd.array([1, None], "Int32")}, "'i4': the transform gives no value for 1 of 2 rows"),
        ({"us": [pd.Timestamp(0), pd.NaT]}, "'us': the transform gives no value for 1 of 2 rows"),
        ({"day": [pd.Timestamp(DAY), pd.Timestamp("2021-03-01 12:00")]}, "'day': was datetime64.*edit_fields"),
    ],
)
def test_a_transform_may_not_leave_out_values_or_parts_of_them(typed: str, change: Any, refused: str) -> None:
    with pytest.raises(DataError, match=refused):
        types_of(make_batch_reader, typed, TransformSpec(lambda frame: frame.assign(**change)))


def test_schema_after_a_transform() -> None:
    schema = pa.schema({"a": pa.int32(), "b": pa.float64(), "c": pa.string()})
    edit = [edit_field("a", np.float32, ()), edit_field("m", "uint8", (None, 3), True), edit_field("t", np.str_, ())]
    made = transform_schema(schema, TransformSpec(edit_fields=edit, removed_fields=["b"]))
    image = pa.field("m", pa.list_(pa.list_(pa.uint8(), 3)), True)
    assert list(made) == [
        pa.field("c", pa.string()),
        pa.field("a", pa.float32(), False),
        image,
        pa.field("t", pa.string(), False),
    ]
    assert list(transform_schema(schema, TransformSpec(edit_fields=edit, selected_fields=["m", "c"]))) == [
        image,
        pa.field("c", pa.string()),
    ]
    for wrong, refused in (
        (TransformSpec(selected_fields=["x"]), "'x': is in selected_fields, but the rows have a, b, c"),
        (TransformSpec(edit_fields=[edit_field("a", object, ())]), "'a': Arrow has no type for object"),
    ):
        with pytest.raises(DataError, match=refused):
            transform_schema(schema, wrong)


@pytest.mark.parametrize("shuffle", [False, True])
def test_arrays_of_which_few_have_another_length(tmp_path: Path, shuffle: bool) -> None:
    pq.write_table(pa.table({"row": range(200)}), tmp_path / "rows.parquet", row_group_size=50)

    def longer(row: dict[str, Any]) -> dict[str, Any]:
        return {"row": row["row"], "items": np.full(3 if row["row"] in (60, 140) else 2, row["row"])}

    reading = Reading(window=8, lanes=2)
    options: dict[str, Any] = {"transform_spec": TransformSpec(longer), "shuffle_row_groups": shuffle}
    with make_reader(f"file://{tmp_path}", reading=reading, **options) as reader:
        items = {int(row.row): row.items.tolist() for row in reader}
    assert items == {row: [row] * (3 if row in (60, 140) else 2) for row in range(200)}


def test_columns_in_another_order_for_other_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"row": range(3000)}), tmp_path / "rows.parquet", row_group_size=500)

    def turned(row: dict[str, Any]) -> dict[str, Any]:
        made = {"row": row["row"], "less": -row["row"]}
        return made if row["row"] < 2048 else dict(reversed(made.items()))

    spec, reading = TransformSpec(turned), Reading(window=1024)
    with make_reader(f"file://{tmp_path}", transform_spec=spec, shuffle_row_groups=False, reading=reading) as reader:
        assert [(int(row.row), int(row.less)) for row in reader] == [(row, -row) for row in range(3000)]


def edited(url: str, cells: Any, kind: Any, shape: tuple[int, ...] = ()) -> Any:
    spec = TransformSpec(lambda frame: frame.assign(x=cells)[["x"]], edit_fields=[edit_field("x", kind, shape)])
    with make_batch_reader(url, ["i4"], transform_spec=spec, shuffle_row_groups=False) as reader:
        return next(reader).x.tolist()


def test_edited_times_keep_their_nanoseconds(typed: str) -> None:
    assert edited(typed, pd.to_datetime([1, 10**9 + 7]), "datetime64[ns]") == [1, 10**9 + 7]
    assert edited(typed, pd.to_timedelta([1, 7]), "timedelta64[ns]") == [1, 7]
    assert edited(typed, pd.Series([pd.Timestamp(1), pd.Timestamp(2)], dtype=object), "datetime64[ns]") == [1, 2]
    spec = TransformSpec(lambda row: {"x": pd.Timestamp(1)})
    with make_reader(typed, ["i4"], transform_spec=spec) as reader, pytest.raises(DataError, match="'x': has nanosec"):
        list(reader)


@pytest.mark.parametrize(
    ("cells", "kind", "shape", "refused"),
    [
        ([1, 300], np.uint8, (), "has 300, which uint8, its type in edit_fields, cannot hold"),
        ([1.5, 300.5], np.uint8, (), "has 300.0, which uint8"),
        ([1.0, np.nan], np.int32, (), "has nan, which int32"),
        ([np.array([1, -1])] * 2, np.uint8, (2,), "has -1, which uint8"),
        ([np.zeros((2, 3))] * 2, np.float64, (3, 2), r"has rows of shape \(2, 3\), and shape \(3, 2\) in edit_fields"),
        ([np.zeros(5)] * 2, np.float64, (3, 2), r"has rows of shape \(5,\), and shape \(3, 2\)"),
        ([np.zeros(1), np.zeros(2)], np.float64, (2,), "the transform's rows make no column: "),
    ],
)
def test_cells_that_their_edited_field_does_not_hold(
    typed: str, cells: Any, kind: Any, shape: tuple[int, ...], refused: str
) -> None:
    with pytest.raises(DataError, match=f"column 'x': {refused}"):
        edited(typed, cells, kind, shape)


def test_edited_cells_may_be_flat_and_lose_fractions(typed: str) -> None:
    assert edited(typed, [np.arange(6)] * 2, np.int16, (3, 2)) == [[[0, 1], [2, 3], [4, 5]]] * 2
    assert edited(typed, [1.7, -1.7], np.int16) == [1, -1]


@pytest.mark.parametrize(
    ("make", "func", "refused"),
    [
        (make_batch_reader, lambda frame: None, "must return a frame, got NoneType"),
        (
            make_batch_reader,
            lambda frame: pd.concat([frame, frame], axis=1),
            "column 'i4': is in the transform's frame",
        ),
        (make_reader, lambda row: [row], "must return a dictionary for a row, got list"),
        (make_reader, lambda row: row if row["i4"] == 1 else {**row, "x": 1}, "column 'x': is in some rows of the"),
        (make_reader, lambda row: row if row["i4"] == 2 else {**row, "x": 1}, "column 'x': is in some rows of the"),
    ],
)
def test_what_is_no_frame_and_no_row(typed: str, make: Any, func: Any, refused: str) -> None:
    with make(typed, ["i4"], transform_spec=TransformSpec(func)) as reader, pytest.raises(DataError, match=refused):
        list(reader)
