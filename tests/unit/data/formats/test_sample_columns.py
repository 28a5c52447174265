"""Rows of arrays from decoded samples."""

from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa

from farandole.data.formats.sample_columns import Stack, column_of, schema_of
from farandole.data.loading.values import LooseRows, join_values
from farandole.errors import DataError

PAIRS = pa.field("x", pa.list_(pa.int64(), 2))


LARGE = pa.field("x", pa.list_(pa.int64(), 4096))


@pytest.mark.parametrize("field", [PAIRS, LARGE])
def test_a_buffer_that_decode_uses_again_is_copied(field: pa.Field) -> None:
    stack, buffer = Stack(field), np.zeros(field.type.list_size, np.int64)
    for number in (3, 4):
        buffer[:] = number
        stack.add(buffer, "a sample")
    rows = stack.rows()
    assert isinstance(rows, LooseRows) == (field is LARGE)
    joined = join_values([rows])
    assert isinstance(joined, np.ndarray)
    assert joined[:, -1].tolist() == [3, 4]


def test_memory_that_cannot_change_is_not_copied() -> None:
    stack, given = Stack(LARGE), np.asarray(_Picture())
    stack.add(given, "a sample")
    rows = stack.rows()
    assert isinstance(rows, LooseRows)
    assert np.shares_memory(rows.single[0], given)


class _Picture:
    """Makes arrays as an image of Pillow does."""

    __array_interface__: ClassVar = {"version": 3, "typestr": "<i8", "shape": (4096,), "data": bytes(8 * 4096)}


def test_an_array_of_another_shape_is_refused_with_its_sample() -> None:
    stack = Stack(PAIRS)
    stack.add(np.arange(2), "the first")
    with pytest.raises(DataError, match="the second has int64"):
        stack.add(np.arange(3), "the second")


@pytest.mark.parametrize(
    ("first", "kind", "later"),
    [
        ([1, 0.5], pa.float64(), 2**53),
        ([0.5], pa.float64(), np.int8(3)),
        ([None, 1, None], pa.int64(), None),
        ([np.float32(0.5)], pa.float32(), 0.25),
        ([np.float32(0.5)], pa.float32(), float("nan")),
        ([np.float32(0.5)], pa.float32(), float("inf")),
        ([np.int8(1), np.float32(0.5)], pa.float32(), np.int64(2**24)),
        ([np.uint8(1), np.int8(-1)], pa.int16(), 300),
        ([np.int32(1)], pa.int32(), np.array(7)),
        (["a"], pa.string(), np.str_("b")),
        ([True], pa.bool_(), np.bool_(False)),
    ],
)
def test_the_first_samples_decide_a_type_that_holds_them_and_later_ones_are_exact(
    first: list[Any], kind: pa.DataType, later: Any
) -> None:
    values = [*first, later]
    (field,) = schema_of([{"x": value} for value in first], [str(number) for number in range(len(first))])
    assert field.type == kind
    column = column_of(values, [str(number) for number in range(len(values))], field)
    np.testing.assert_array_equal(column.to_pylist(), values)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (1, 0.5),
        (1, 2.0),
        (1, np.float64(0.5)),
        (1, True),
        (1, 2**63),
        (0.5, 2**53 + 1),
        (0.5, 10**400),
        (0.5, True),
        (np.float32(0.5), np.float64(0.1)),
        (np.float32(0.5), 1e300),
        (np.float32(0.5), True),
        (np.int8(1), 128),
        (True, 1),
        ("a", b"a"),
        ("a", "\ud800"),
        (b"a", "a"),
        (1, np.array([1, 2])),
    ],
)
def test_a_later_value_that_the_type_does_not_hold_exactly_is_refused_with_both_types(first: Any, later: Any) -> None:
    (field,) = schema_of([{"x": first}], ["line 1 of a.jsonl"])
    with pytest.raises(DataError, match=rf"line 2 of a.jsonl has .* of type \w+, which {field.type}, the type"):
        column_of([first, later], ["line 1 of a.jsonl", "line 2 of a.jsonl"], field)


@pytest.mark.parametrize("value", [2**70, np.complex64(1), None, {}, "\ud800"])
def test_a_value_that_no_column_holds_is_refused_with_its_sample(value: object) -> None:
    with pytest.raises(DataError, match=r"column 'x': line 1: no column holds "):
        schema_of([{"x": value}], ["line 1"])
