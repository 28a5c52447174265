"""Transforms of a `Loader` that return other columns or types for other rows."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

from farandole.data import Loader, ParquetSource, Reading, Values
from farandole.data.loading.rounds import Columns
from farandole.errors import DataError
from helpers.datasets import RAGGED, write_rows


class LikeSeries:
    """An object that NumPy takes for an array, as a pandas Series is."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> Values:
        return self._values


def first_half(rows: Columns) -> bool:
    return bool(np.max(rows["row"]) < 90)  # type: ignore[arg-type]


def loader_of(folder: Path, transform: Callable[[Columns], object], *, processes: bool = False) -> Loader:
    write_rows(folder, RAGGED["even"])
    reading = Reading(shuffle=processes, window=8, transform=transform, processes=processes)  # type: ignore[arg-type]
    return Loader(ParquetSource(str(folder)), columns=["row"], batch_size=7, policy="join", reading=reading)


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_columns_of_some_rows_only_are_named(tmp_path: Path, first: bool, processes: bool) -> None:
    def transform(rows: Columns) -> Columns:
        return {**rows, "more": rows["row"]} if first_half(rows) == first else rows

    with pytest.raises(DataError, match="column 'more': is among the columns of some rows only"):
        list(loader_of(tmp_path, transform, processes=processes))


@pytest.mark.parametrize("column", [[1] * 8, 1.0, np.array(1), np.float32(1)])
def test_what_is_no_column_is_named(tmp_path: Path, column: object) -> None:
    with pytest.raises(DataError, match=r"column 'more': the transform returned .*; return an array with an item for"):
        list(loader_of(tmp_path, lambda rows: {**rows, "more": column}))


def test_what_numpy_takes_for_an_array_is_a_column(tmp_path: Path) -> None:
    seen = [batch["row"] for batch in loader_of(tmp_path, lambda rows: {"row": LikeSeries(rows["row"])})]
    assert np.concatenate(seen).tolist() == list(range(180))  # type: ignore[arg-type]
