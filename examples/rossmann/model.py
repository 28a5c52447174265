"""The network: an embedding for each categorical column, and dense layers over all of them and the measures."""

from collections.abc import Sequence
from typing import Any

import keras

from rossmann.features import CATEGORICAL, CONTINUOUS

WIDEST = 10  # numbers of an embedding


class RMSPE(keras.metrics.Mean):  # type: ignore[misc]  # Keras ships no types
    """Root of the mean squared relative error of sales, from logarithms of sales."""

    def __init__(self, name: str = "rmspe", dtype: Any = None) -> None:
        super().__init__(name, dtype)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count a batch of logarithms."""
        errors = keras.ops.square(1.0 - keras.ops.exp(y_pred - y_true))
        super().update_state(keras.ops.mean(errors, axis=-1), sample_weight)

    def result(self) -> Any:
        """Return the error of all batches since the last reset."""
        return keras.ops.sqrt(super().result())


def build(
    cardinalities: Sequence[int], *, label_scale: tuple[float, float], hidden: Sequence[int], dropout: float
) -> Any:
    """Return a model of CODES and MEASURES, one input each, whose output is the logarithm of sales.

    `cardinalities` are the numbers of codes, `label_scale` mean and deviation of the logarithms. The scale is part of
    the model, and all layers are Keras' own, so that a saved model needs nothing else."""
    codes = [keras.Input((), dtype="int32", name=f"{name}_code") for name in CATEGORICAL]
    measures = keras.Input((len(CONTINUOUS),), name="measures")
    embedded = [
        keras.layers.Embedding(count, min(WIDEST, (count + 1) // 2), name=f"{name}_embedding")(code)
        for name, count, code in zip(CATEGORICAL, cardinalities, codes, strict=True)
    ]
    layer = keras.layers.Concatenate()([*embedded, measures])
    for width in hidden:
        layer = keras.layers.Dense(width, activation="relu")(layer)
        layer = keras.layers.Dropout(dropout)(layer)
    output = keras.layers.Dense(1)(layer)
    output = keras.layers.Rescaling(label_scale[1], label_scale[0], name="log_sales")(output)
    return keras.Model([*codes, measures], output)
