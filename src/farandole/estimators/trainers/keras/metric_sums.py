"""Values of Keras' metrics over the rows of all ranks, from the sums in the metrics' variables."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import keras
import numpy as np

from farandole.estimators.trainers.keras.model import Array
from farandole.keras.backend import Metric, Model
from farandole.keras.callbacks.metrics import named_metrics
from farandole.keras.generation import generation_of

Sums: TypeAlias = dict[str, list[Array]]  # a metric's variables, by its name in the logs


def metric_sums(model: Model) -> Sums:
    """Return the variables of those of the model's metrics whose value is a function of sums over rows."""
    return {name: _values(metric) for name, metric in _metrics_of_sums(model).items()}


def values_over_ranks(model: Model, every: Sequence[Mapping[str, Sequence[Array]]]) -> dict[str, float]:
    """Return the values of these metrics for the sums of `every` rank, by name; those of one number only."""
    values = {}
    for name, metric in _metrics_of_sums(model).items():
        if any(name not in each for each in every):
            continue
        own = _values(metric)
        _assign(metric, [_total(each) for each in zip(*(each[name] for each in every), strict=True)])
        value = keras.ops.convert_to_numpy(metric.result())
        _assign(metric, own)
        if value.size == 1:
            values[name] = float(value.reshape(()))
    return values


def _metrics_of_sums(model: Model) -> dict[str, Metric]:
    """Return the metrics whose `result` is Keras' own, by name: the variables of all Keras' metrics are sums over rows.

    Those of a user's own class may be anything, such as a maximum."""
    library = generation_of(model).library.__name__
    named = (each for metric in model.metrics for each in named_metrics(metric))
    return {
        name: each
        for name, each in named
        if each.variables and type(each).result.__module__.partition(".")[0] == library
    }


def _values(metric: Metric) -> list[Array]:
    return [keras.ops.convert_to_numpy(each) for each in metric.variables]


def _assign(metric: Metric, values: Sequence[Array]) -> None:
    for variable, value in zip(metric.variables, values, strict=True):
        variable.assign(value)


def _total(each: Sequence[Array]) -> Array:
    dtype = each[0].dtype
    total: Array = np.stack(each).sum(axis=0, dtype=dtype if dtype.kind in "iu" else np.float64)
    return np.asarray(total, dtype)
