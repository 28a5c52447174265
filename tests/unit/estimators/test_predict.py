"""Batches of rows through a model in Spark's Python workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("pyspark")

import pandas as pd

from farandole.errors import ConfigError, DataError
from farandole.estimators import transformer
from farandole.estimators.predictions.batches import BatchPredictor, Predict
from farandole.estimators.trainers.keras.model import Inputs, dump_state, load_state


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


@pytest.mark.parametrize(
    "given", [["ä", "", "bc"], [b"a", b"", b"bc"], [bytearray(b"a"), bytearray(), bytearray(b"\0")]]
)
def test_texts_become_bytes(given: list[str | bytes | bytearray]) -> None:
    (texts,) = Sums(names=("x",)).arrays((pd.Series(given),))
    assert texts.dtype == object and texts.shape == (3,)
    assert texts.tolist() == [each.encode() if isinstance(each, str) else bytes(each) for each in given]


def test_a_model_gets_texts_for_inputs_of_strings_only() -> None:
    inputs = Inputs(columns=("city", "x"), dtypes=("string", "float32"), shapes=((1,), None))
    texts, numbers = np.array([b"a", b"b"], object), np.ones(2)
    city, _ = inputs.arrays({"city": texts, "x": numbers})
    assert np.asarray(city).tolist() == [[b"a"], [b"b"]]
    with pytest.raises(DataError, match="column 'city': holds numbers, and the model takes string"):
        inputs.arrays({"city": numbers, "x": numbers})
    with pytest.raises(DataError, match="column 'x': holds texts, and the model takes float32"):
        inputs.arrays({"city": texts, "x": texts})


@pytest.mark.parametrize("numbers", [[0.0, 0.5], [0.0, np.nan], [2, 1], [-1, 0]])
def test_an_input_of_booleans_takes_zeros_and_ones_only(numbers: list[float]) -> None:
    inputs = Inputs(columns=("x",), dtypes=("bool",), shapes=(None,))
    for whole in (np.array([1, 0], np.int8), np.array([1.0, 0.0])):
        assert np.asarray(inputs.arrays({"x": whole})).tolist() == [True, False]
    with pytest.raises(DataError, match="column 'x': holds numbers that bool cannot hold"):
        inputs.arrays({"x": np.array(numbers)})


def test_integers_that_jax_would_cut_to_32_bits_are_refused(monkeypatch: pytest.MonkeyPatch, frameworks: None) -> None:
    keras = pytest.importorskip("keras")
    pytest.importorskip("jax")
    from farandole.estimators.trainers.keras.training import KerasTrainer

    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    number = keras.Input((), dtype="int64")
    inputs = Inputs.of(keras.Model(number, number + 1), ["x"])
    assert np.asarray(inputs.arrays({"x": np.array([7, 2**31 - 1])})).tolist() == [7, 2**31 - 1]
    with pytest.raises(DataError, match="column 'x': holds numbers that int32 cannot hold"):
        inputs.arrays({"x": np.array([7, 2**40])})

    plan = SimpleNamespace(label_cols=("y",), label_shapes=None)
    trainer = SimpleNamespace(_floatx="float32", job=SimpleNamespace(plan=plan), outputs=[("float32", [1])])
    label = KerasTrainer._label(trainer, 0, np.array([7, 2**31 - 1]))  # type: ignore[arg-type]
    assert label.tolist() == [[7], [2**31 - 1]]
    with pytest.raises(DataError, match="column 'y': holds integers that int32 cannot hold"):
        KerasTrainer._label(trainer, 0, np.array([7, 2**40]))  # type: ignore[arg-type]


def test_arrays_of_different_lengths_are_named_by_their_column() -> None:
    with pytest.raises(DataError, match="column 'x': arrays of different lengths"):
        list(Sums(names=("total", "same"))(iter([rows([1, 2], [3])])))


@dataclass(frozen=True, kw_only=True)
class Means(Sums):
    """Gives the mean of all rows, and the first row."""

    def load(self) -> Predict:
        return lambda values: [np.asarray(values[0].mean()), values[0][:1]][: len(self.names)]


def test_outputs_have_one_item_per_row() -> None:
    one, two = Means(names=("mean",)), Means(names=("mean", "first"))
    with pytest.raises(ConfigError, match=r"^model: an output has the shape \[\] for 2 rows; transform needs one row"):
        list(one(iter([rows([1, 2], [3, 4])])))
    with pytest.raises(ConfigError, match=r"^model: output 0 has the shape \[\] for 1 rows"):
        two.outputs((rows([1, 2]),))

    class First(Means):
        def load(self) -> Predict:
            return lambda values: [values[0][:1]]

    with pytest.raises(ConfigError, match=r"^model: an output has the shape \[1, 2\] for 2 rows"):
        list(First(names=("first",))(iter([rows([1, 2], [3, 4])])))


def test_a_stream_has_no_row_to_learn_outputs_from() -> None:
    with pytest.raises(ConfigError, match="model: has outputs of unknown types, and a stream has no row yet"):
        transformer.first_row(SimpleNamespace(isStreaming=True), ["x"])  # type: ignore[arg-type]


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
