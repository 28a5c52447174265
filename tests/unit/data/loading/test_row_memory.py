"""Memory of decoded rows: parts of a row group are joined as if it had been read at once."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.data.loading.row_memory import RowMemory, TemporaryRows
from farandole.data.loading.values import LooseRows, Ragged, SparseRows, ValuesOrLoose

MEMORIES = [RowMemory, TemporaryRows]


def columns(rows: int) -> dict[str, ValuesOrLoose]:
    offsets = np.concatenate([[0], np.cumsum(np.arange(rows) % 3)])
    texts = np.array([f"text {row}" for row in range(rows)], object)
    return {
        "id": np.arange(rows),
        "image": np.arange(rows * 6, dtype=np.uint8).reshape(rows, 2, 3),
        "text": texts,
        "ragged": Ragged(np.arange(offsets[-1], dtype=np.float32), offsets),
        "sparse": SparseRows(np.arange(offsets[-1]) * 0.5, np.arange(offsets[-1]) % 7, offsets, 7),
    }


def cut(whole: dict[str, ValuesOrLoose], ends: list[int]) -> Iterator[dict[str, ValuesOrLoose]]:
    first = 0
    for last in ends:
        yield {name: values[first:last] for name, values in whole.items()}
        first = last


def assert_same(found: dict[str, ValuesOrLoose] | None, expected: dict[str, ValuesOrLoose]) -> None:
    assert found is not None
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        got = found[name]
        assert type(got) is type(values)
        for part in ("values", "indices", "offsets") if not isinstance(values, np.ndarray) else ():
            np.testing.assert_array_equal(getattr(got, part, 0), getattr(values, part, 0))
        if isinstance(values, np.ndarray) and isinstance(got, np.ndarray):
            assert got.dtype == values.dtype
            np.testing.assert_array_equal(got, values)


@pytest.mark.parametrize("memory", MEMORIES)
@given(rows=st.integers(0, 30), data=st.data())
def test_parts_are_joined_to_the_whole(memory: type[RowMemory], rows: int, data: st.DataObject) -> None:
    ends = [*sorted(data.draw(st.lists(st.integers(0, rows), max_size=4))), rows]
    assert_same(memory().join(cut(columns(rows), ends), rows), columns(rows))


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("rows", [3, 5])
def test_parts_of_another_number_of_rows_are_refused(memory: type[RowMemory], rows: int) -> None:
    assert memory().join(cut(columns(4), [2, 4]), rows) is None


@pytest.mark.parametrize(
    "second",
    [
        np.zeros((2, 2), np.float64),
        np.zeros((2, 3), np.float32),
        np.array([None, None], object),
        Ragged(np.zeros(4, np.float32), np.array([0, 2, 4])),
        LooseRows([np.zeros((1, 2), np.float32)] * 2),
    ],
    ids=["dtype", "shape", "objects", "ragged", "loose"],
)
@pytest.mark.parametrize("turned", [False, True])
def test_parts_of_several_types_are_refused(second: ValuesOrLoose, turned: bool) -> None:
    parts: list[dict[str, ValuesOrLoose]] = [{"x": np.zeros((2, 2), np.float32)}, {"x": second}]
    assert RowMemory().join(reversed(parts) if turned else parts, 4) is None


def test_a_single_part_is_not_copied_and_its_source_is_read_to_the_end() -> None:
    part, ended = columns(3), []

    def parts() -> Iterator[dict[str, ValuesOrLoose]]:
        yield part
        ended.append(True)

    assert RowMemory().join(parts(), 3) is part
    assert ended
