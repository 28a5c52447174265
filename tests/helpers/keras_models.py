"""A small Keras model and its data, for tests in which ranks train like one process that has all their rows.

Keras reads its backend from the environment when it is imported, so only child processes import this module."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ROWS, STEPS, EPOCHS = 8, 4, 2  # rows of all ranks per step


def build(seed: int = 3, dtype: str | None = None) -> Any:
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(7, activation="tanh", dtype=dtype), keras.layers.Dense(2, dtype=dtype)]
    )
    random = np.random.default_rng(seed)
    model.set_weights([random.normal(size=weight.shape).astype("float32") / 2 for weight in model.weights])
    return model


def rows(rank: int = 0, size: int = 1) -> tuple[Array, Array]:
    """Return a rank's rows of all steps, ordered by step."""
    random = np.random.default_rng(1)
    both = random.normal(size=(STEPS, size, ROWS // size, 5)), random.normal(size=(STEPS, size, ROWS // size, 2))
    random_in, random_out = (each[:, rank].reshape(-1, each.shape[-1]).astype("float32") for each in both)
    return random_in, random_out


def fit(model: Any, optimizer: Any, rank: int = 0, size: int = 1, **options: Any) -> Any:
    """Train `model` on the rows of a rank; return it."""
    compiled = {name: options.pop(name) for name in ("steps_per_execution", "run_eagerly") if name in options}
    # Keras cannot read the name "mse" from an .h5 file.
    model.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError(), **compiled)
    inputs, targets = rows(rank, size)
    settings: dict[str, Any] = {"epochs": EPOCHS, "shuffle": False, "verbose": 0, "batch_size": ROWS // size}
    model.fit(inputs, targets, **{**settings, **options})
    return model


def values(model: Any) -> Array:
    """Return all weights of a model in one array."""
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


def assert_refused(kind: type[Exception], text: str, call: Any) -> None:
    """Check that `call()` raises an error of type `kind` with this text."""
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing was raised with {text!r}")


def assert_same(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


Make = Callable[[], Any]
