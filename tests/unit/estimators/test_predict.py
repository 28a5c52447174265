"""Batches of rows through a model in Spark's Python workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("pyspark")

import pandas as pd

from farandole.errors import DataError
from farandole.estimators import transformer
from farandole.estimators.predictions.batches import BatchPredictor, Predict
from farandole.estimators.trainers.keras.model import dump_state, load_state


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


def test_the_state_of_a_keras_model_may_have_types_that_numpy_lacks() -> None:
    types = pytest.importorskip("ml_dtypes")
    values = np.array([0.5, -3.0, 224.0])
    weights = [values.astype(each) for each in (types.bfloat16, types.float8_e5m2, np.float64)]
    loaded, optimizer, best = load_state(dump_state(weights, None))
    assert [each.dtype for each in loaded] == ["float32", "float32", "float64"] and optimizer == [] and best is None
    assert all(each.tolist() == values.tolist() for each in loaded)


def test_workers_of_all_predictions_run_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chosen(Exception):
        pass

    def choose(session: object) -> None:
        raise Chosen(session)

    monkeypatch.setattr(transformer, "use_own_interpreter", choose)
    with pytest.raises(Chosen, match="session"):
        transformer.add_columns(SimpleNamespace(sparkSession="session"), [], [], [], [], Sums(names=()))  # type: ignore[arg-type]
