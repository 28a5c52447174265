"""A small model and its data, for tests in which ranks train like one process that has all their rows."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

ROWS = 12  # divisible by all sizes

Array: TypeAlias = npt.NDArray[Any]


class Model:
    """An embedding, whose gradient is sparse, and a layer; `variable` makes the variables, as tf.Variable does."""

    def __init__(self, variable: Callable[..., Any] = tf.Variable, seed: int = 3) -> None:
        random = np.random.default_rng(seed)
        shapes = {"table": (6, 3), "kernel": (3, 2), "bias": (2,)}
        self.variables = [variable(random.normal(size=shape) / 2, name=name) for name, shape in shapes.items()]

    def loss(self, ids: Any, targets: Any) -> Any:
        table, kernel, bias = self.variables
        hidden = tf.tanh(tf.reduce_mean(tf.gather(table, ids), 1))
        return tf.reduce_mean((tf.matmul(hidden, tf.convert_to_tensor(kernel)) + bias - targets) ** 2)


def rows(step: int, rank: int = 0, size: int = 1) -> tuple[Array, Array]:
    """Return the rank's part of a step's rows: two identifiers each, with many duplicates, and targets."""
    random = np.random.default_rng(step)
    ids, targets = random.integers(0, 6, (ROWS, 2)), random.normal(size=(ROWS, 2))
    return np.split(ids, size)[rank], np.split(targets, size)[rank]


def as_arrays(values: Any) -> list[Array]:
    """Return gradients, variables or a session's results as dense arrays of float64."""
    return [
        np.asarray(value if isinstance(value, np.ndarray) else tf.convert_to_tensor(value), np.float64)
        for value in values
    ]
