"""Columns as tensors, outputs as columns."""

import uuid
from collections.abc import Callable

import cloudpickle
import numpy as np
import pytest

pytest.importorskip("torch")


pytest.importorskip("pyspark")

import pandas as pd
import torch

from farandole.errors import ConfigError, DataError
from farandole.estimators.predictions.batches import column_type
from farandole.estimators.predictions.torch import Predictor
from farandole.estimators.trainers.torch.tensors import Inputs, fit_label, outputs_of


def inputs(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] | None = None) -> Inputs:
    return Inputs(columns=("x",), shapes=None if shape is None else (shape,), dtype=dtype)


def test_inputs_take_the_type_and_the_shape_of_the_model() -> None:
    tensor = inputs(torch.float32, (-1, 1, 2, 2)).tensor(0, np.arange(12.0).reshape(3, 4))
    assert tensor.dtype == torch.float32
    assert tensor.shape == (3, 1, 2, 2)
    assert inputs(torch.float64).tensor(0, np.ones(3, np.float32)).dtype == torch.float64


def test_integers_that_a_float_cannot_hold_are_refused() -> None:
    assert inputs().tensor(0, np.array([2**24])).item() == 2**24
    with pytest.raises(DataError, match="column 'x': holds integers that float32 cannot hold"):
        inputs().tensor(0, np.array([2**24 + 1]))


def test_a_shape_that_does_not_fit_is_named() -> None:
    with pytest.raises(DataError, match=r"rows of shape \[4\] do not fit input shape \(-1, 3\)"):
        inputs(shape=(-1, 3)).tensor(0, np.ones((3, 4), np.float32))


@pytest.mark.parametrize(
    ("label", "output_shape", "dtype", "shape"),
    [
        (np.array([1, 2]), (2, 10), torch.int64, (2,)),  # classes
        (np.array([1, 0], np.int8), (2, 1), torch.float32, (2, 1)),  # yes or no
        (np.array([0.5, 1.5]), (2, 1), torch.float32, (2, 1)),
        (np.ones((2, 4)), (2, 1, 2, 2), torch.float32, (2, 1, 2, 2)),  # an image
        (np.array([0.5, 1.5]), (2, 3), torch.float32, (2,)),
    ],
)
def test_labels_fit_outputs(
    label: np.ndarray, output_shape: tuple[int, ...], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    fitted = fit_label(label, torch.zeros(output_shape), torch.float32)
    assert (fitted.dtype, tuple(fitted.shape)) == (dtype, shape)


def test_a_model_gives_one_tensor_per_label() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    assert outputs_of(one, ["a"]) == [one]
    assert outputs_of((one, two), ["a", "b"]) == [one, two]
    for given in ((one, two), {"a": one}, (one, None)):
        with pytest.raises(ConfigError, match="model: gives"):
            outputs_of(given, ["a"])


@pytest.mark.parametrize(
    ("dtype", "shape", "kind"),
    [
        ("float32", (), "float"),
        ("float32", (1,), "float"),
        ("float64", (3,), "array<double>"),
        ("bfloat16", (2, 2), "array<float>"),
        ("int64", (), "bigint"),
        ("bool", (), "boolean"),
    ],
)
def test_types_of_output_columns(dtype: str, shape: tuple[int, ...], kind: str) -> None:
    assert column_type(dtype, shape) == kind


def predictor(model: torch.nn.Module, **changes: object) -> Predictor:
    settings: dict[str, object] = {"inputs": inputs(), "label_cols": ("y",), "names": ("y__output",)}
    return Predictor(model=cloudpickle.dumps(model), **(settings | changes))  # type: ignore[arg-type]


def test_predictions_are_the_models_own_whatever_the_batches() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout())
    rows = np.random.default_rng(0).normal(size=(2500, 3)).astype(np.float32)
    batches = [(pd.Series(list(part)),) for part in (rows[:1700], rows[:0], rows[1700:])]
    seen = pd.concat(list(predictor(model)(iter(batches))))
    expected = model.eval()(torch.from_numpy(rows)).detach().numpy()
    assert list(seen.columns) == ["y__output"]
    np.testing.assert_allclose(np.stack(seen["y__output"].to_list()), expected, rtol=1e-5, atol=1e-6)


def test_one_number_per_row_is_a_number() -> None:
    class Half(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, None] / 2

    # A single column comes without its tuple.
    (seen,) = predictor(Half())(iter([pd.Series([2.0, 4.0])]))
    assert seen["y__output"].to_list() == [1.0, 2.0]


def test_a_worker_unpickles_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    load: Callable[[bytes], object] = cloudpickle.loads
    monkeypatch.setattr(cloudpickle, "loads", lambda content: loaded.append(content) or load(content))
    twice = predictor(torch.nn.Identity(), key=uuid.uuid4())
    for _ in range(2):
        list(twice(iter([(pd.Series([1.0]),)])))
    assert len(loaded) == 1


def test_the_model_gets_nan() -> None:
    (seen,) = predictor(torch.nn.Identity())(iter([(pd.Series([1.0, np.nan]),)]))
    np.testing.assert_array_equal(seen["y__output"], [1.0, np.nan])


def test_rows_that_cannot_be_predicted_are_named() -> None:
    apply = predictor(torch.nn.Identity())
    with pytest.raises(DataError, match="column 'x': arrays of different lengths"):
        list(apply(iter([(pd.Series([np.ones(2), np.ones(3)]),)])))
