"""Rows of one column from several row groups."""

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("pyarrow")

from farandole.data.values import gather_rows

MIXED = [
    ([np.array([1, 2], np.int32), np.array([2**40 + 7, 5])], [1, 2, 2**40 + 7, 5]),
    ([np.array([0.5, 1.5], np.float32), np.array([0.1, 2.0])], [0.5, 1.5, 0.1, 2.0]),
    ([np.array(["abc", "de"]), np.array(["hello", "x"])], ["abc", "de", "hello", "x"]),
    ([np.array([1], np.int32), np.array([2**40 + 7])], [1, 2**40 + 7]),  # one row per part
]


@pytest.mark.parametrize(("parts", "expected"), MIXED)
def test_parts_of_several_types_are_gathered_in_a_type_that_holds_all(
    parts: list[NDArray[np.generic]], expected: list[object]
) -> None:
    rows, scratch = np.arange(len(expected))[::-1], {"x": np.zeros(100, np.int32)}  # left by narrower parts
    gathered = gather_rows([*parts], rows, scratch, "x")
    assert isinstance(gathered, np.ndarray)
    assert gathered.tolist() == expected[::-1]


def test_memory_is_reused() -> None:
    scratch: dict[str, NDArray[np.generic]] = {}
    gather_rows([np.arange(2), np.arange(2)], np.arange(4), scratch, "x")
    first = scratch["x"]
    gather_rows([np.arange(2), np.arange(1)], np.arange(3), scratch, "x")
    assert scratch["x"] is first
