"""Rows of arrays from decoded samples."""

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa

from farandole.data.sample_columns import Stack
from farandole.errors import DataError

PAIRS = pa.field("x", pa.list_(pa.int64(), 2))


@pytest.mark.parametrize("expected", [1, 2, 3, 8])
def test_all_added_rows_are_there_even_if_others_were_expected(expected: int) -> None:
    stack = Stack(PAIRS, expected)
    for number in range(5):
        stack.add(np.array([number, -number]), f"sample {number}")
    assert stack.rows().tolist() == [[number, -number] for number in range(5)]


def test_a_buffer_that_decode_uses_again_is_copied() -> None:
    stack, buffer = Stack(PAIRS, 2), np.zeros(2, np.int64)
    for number in (3, 4):
        buffer[:] = number
        stack.add(buffer, "a sample")
    assert stack.rows().tolist() == [[3, 3], [4, 4]]


def test_a_single_row_is_not_copied_and_cannot_be_written() -> None:
    stack, given = Stack(PAIRS, 1), np.arange(2)
    stack.add(given, "a sample")
    rows = stack.rows()
    assert np.shares_memory(rows, given)
    assert not rows.flags.writeable
    assert given.flags.writeable


def test_an_array_of_another_shape_is_refused_with_its_sample() -> None:
    stack = Stack(PAIRS, 2)
    stack.add(np.arange(2), "the first")
    with pytest.raises(DataError, match="the second has int64"):
        stack.add(np.arange(3), "the second")
