"""Rows of arrays from decoded samples."""

from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa

from farandole.data.sample_columns import Stack
from farandole.data.values import LooseRows, join_values
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
