"""Rows of one column from several row groups."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("pyarrow")

from farandole.data.loading.values import LooseRows, Ragged, Values, gather_rows, join_values
from farandole.errors import DataError

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


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any), st.integers(0, 2**32), st.data())
def test_large_rows_are_copied_once_to_the_batch(counts: list[int], seed: int, data: st.DataObject) -> None:
    random, scratch = np.random.default_rng(seed), dict[str, NDArray[np.generic]]()
    parts = [random.integers(0, 256, (count, 4, 4096), np.uint8) for count in counts]
    loose = [
        LooseRows(list(np.split(part, len(part)))) if len(part) and random.random() < 0.5 else part for part in parts
    ]
    rows = random.permutation(sum(counts))[: random.integers(0, sum(counts)) + 1]
    gathered = gather_rows(loose, rows, scratch, "x")
    assert isinstance(gathered, LooseRows)
    assert all(any(np.shares_memory(row, part) for part in parts) for row in gathered.single) and not scratch
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=2))), len(rows)]
    whole = join_values([gathered[first:last] for first, last in itertools.pairwise(cuts)])
    assert isinstance(whole, np.ndarray)
    assert np.array_equal(whole, np.concatenate(parts)[rows])
    assert whole.flags.writeable and not any(np.shares_memory(whole, part) for part in parts)


def test_large_rows_of_several_types_get_one_that_holds_all() -> None:
    parts = [np.full((1, 8192), 2**60, np.int64), np.full((2, 8192), 3, np.int16)]
    gathered = gather_rows([*parts], np.array([1, 0]), {}, "x")
    assert isinstance(gathered, np.ndarray)
    assert gathered.dtype == np.int64 and gathered[:, 0].tolist() == [3, 2**60]


def test_large_rows_may_lie_in_any_order_in_memory() -> None:
    image = np.frombuffer(bytes(range(256)) * 192, np.uint8).reshape(128, 128, 3)
    transposed = image.transpose(2, 0, 1)[np.newaxis]
    whole = join_values([LooseRows([transposed, transposed[:, :, ::-1]])])
    assert np.array_equal(whole, np.stack([image.transpose(2, 0, 1), image.transpose(2, 0, 1)[:, ::-1]]))  # type: ignore[arg-type]


def test_an_empty_part_does_not_make_small_rows_large() -> None:
    scratch: dict[str, NDArray[np.generic]] = {}
    gathered = gather_rows([np.arange(0), np.arange(4), np.arange(2)], np.array([5, 0, 3]), scratch, "x")
    assert isinstance(gathered, np.ndarray)
    assert gathered.tolist() == [1, 0, 3]
    assert len(scratch["x"]) == 6


@pytest.mark.parametrize("second", [np.array([[4, 5, 6]]), Ragged(np.array([4, 5, 6]), np.array([0, 3]))])
def test_arrays_of_other_lengths_than_earlier_ones_become_ragged(second: Values) -> None:
    parts = [np.array([[0, 1], [2, 3]]), second]
    expected = [[0, 1], [2, 3], [4, 5, 6]]
    joined, gathered = join_values(parts), gather_rows(parts, np.array([2, 0, 1]), {}, "x")
    assert isinstance(joined, Ragged) and [row.tolist() for row in joined.rows()] == expected
    assert isinstance(gathered, Ragged)
    assert [row.tolist() for row in gathered.rows()] == [expected[row] for row in (2, 0, 1)]


UNLIKE = [
    (np.zeros(3), np.zeros((1, 2))),
    (np.zeros((3, 2, 2)), np.zeros((1, 2, 3))),
    (np.zeros((3, 2, 2)), Ragged(np.zeros((4, 3)), np.array([0, 4]))),
]


@pytest.mark.parametrize(("first", "second"), UNLIKE)
def test_rows_that_no_class_holds_together_are_refused(first: Values, second: Values) -> None:
    refused = "column 'x': has rows of shapes .* and .*, which no batch holds together"
    with pytest.raises(DataError, match=refused):
        join_values([first, second], "x")
    with pytest.raises(DataError, match=refused):
        gather_rows([first, second], np.arange(4), {}, "x")
