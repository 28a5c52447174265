"""Batches of rows through a model in Spark's Python workers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("pyspark")

import pandas as pd

from farandole.errors import DataError
from farandole.spark.trainers.predict import BatchPredictor, Predict


@dataclass(frozen=True, kw_only=True)
class Sums(BatchPredictor):
    """Gives the sum of each row, and the row itself."""

    columns: Sequence[str] = ("x",)

    def load(self) -> Predict:
        return lambda values: [values[0].sum(1), values[0]]


def rows(*given: Sequence[float]) -> pd.Series:
    return pd.Series([np.array(each, np.float32) for each in given])


def test_numbers_keep_their_type_and_arrays_their_length() -> None:
    (made,) = Sums(names=("total", "same"))(iter([rows([1, 2], [3, 4], [5, 6])]))
    assert made["total"].dtype == np.float32
    assert made["total"].to_list() == [3, 7, 11]
    assert [each.tolist() for each in made["same"]] == [[1, 2], [3, 4], [5, 6]]


def test_arrays_of_different_lengths_are_named_by_their_column() -> None:
    with pytest.raises(DataError, match="column 'x': arrays of different lengths"):
        list(Sums(names=("total", "same"))(iter([rows([1, 2], [3])])))
