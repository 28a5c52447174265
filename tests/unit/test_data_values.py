"""Rows of one column from several row groups."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
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


@given(st.lists(st.integers(0, 3), min_size=2, max_size=5), st.integers(0, 2**32))
def test_large_rows_are_gathered_without_scratch_memory(counts: list[int], seed: int) -> None:
    random, scratch = np.random.default_rng(seed), dict[str, NDArray[np.generic]]()
    parts = [random.integers(0, 256, (count, 4, 4096), np.uint8) for count in counts]
    rows = random.permutation(sum(counts))[: random.integers(0, sum(counts) + 1)]
    gathered = gather_rows([*parts], rows, scratch, "x")
    assert isinstance(gathered, np.ndarray)
    assert np.array_equal(gathered, np.concatenate(parts)[rows])
    assert not scratch


def test_an_empty_part_does_not_make_small_rows_large() -> None:
    scratch: dict[str, NDArray[np.generic]] = {}
    gathered = gather_rows([np.arange(0), np.arange(4), np.arange(2)], np.array([5, 0, 3]), scratch, "x")
    assert isinstance(gathered, np.ndarray)
    assert gathered.tolist() == [1, 0, 3]
    assert len(scratch["x"]) == 6
