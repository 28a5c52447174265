"""Callback that averages metrics over ranks."""

import numbers
from typing import SupportsFloat

import keras
import numpy as np

from farandole.core.operations.objects import allgather_object
from farandole.keras.callbacks.base import Callback
from farandole.keras.generation import generation_of


class MetricAverageCallback(Callback):
    """Replaces the metrics of an epoch, including those of validation, with their mean over the samples of all ranks.

    A metric that is a mean, or the root of one, counts for each rank as the samples, or weights of samples, that it has
    seen there. Others, such as AUC, and the losses of single outputs count as the samples of the loss. Where Keras has
    counted none, as with a train_step that returns values of its own, and with `weighted=False`, as in Horovod, all
    ranks count alike.

    Callbacks after it in `fit`'s list see the average, callbacks before it the rank's own values. A callback that
    evaluates the model at the end of an epoch belongs after it, unless `fit` validates: the evaluation resets Keras'
    counts of samples. (A method for the end of a batch would know better, but Keras 3 would wait for each batch.)
    `device` is an argument of Horovod's and is ignored."""

    def __init__(self, device: str = "", *, weighted: bool = True) -> None:
        super().__init__()
        self._weighted = weighted
        # The counts of the epoch's training and of its validation, once they have ended.
        self._trained: dict[str, float] | None = None
        self._validated: dict[str, float] | None = None

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Forget the counts of the last epoch."""
        self._trained = self._validated = None

    def on_test_begin(self, logs: object = None) -> None:
        """Note how many samples the training has counted, before the validation counts its own."""
        if self._trained is None:
            self._trained = self._counts()

    def on_test_end(self, logs: object = None) -> None:
        """Note how many samples the validation has counted."""
        self._validated = self._counts()

    def on_epoch_end(self, epoch: int, logs: dict[str, SupportsFloat] | None = None) -> None:
        """Average the logs. Blocks until every rank takes part; raises `ValueError` if ranks have different metrics."""
        if logs is None:
            return
        validated = self._validated or {}
        counts = (self._trained or self._counts()) | {f"val_{name}": count for name, count in validated.items()}
        mine = {
            name: (float(value), counts.get(name, counts.get("val_loss" if name.startswith("val_") else "loss", 0.0)))
            for name, value in logs.items()
            if _is_number(value)
        }
        every = allgather_object(mine, name="metrics")
        for rank, theirs in enumerate(every):
            if theirs.keys() != mine.keys():
                differing = ", ".join(sorted(theirs.keys() ^ mine.keys()))
                raise ValueError(
                    f"rank {rank} has other metrics than this one ({differing}): compile, and validate, on all alike"
                )
        root = generation_of(self.model).library.metrics.RootMeanSquaredError
        roots = {name for name, mean in self._means().items() if isinstance(mean, root)}
        for name in mine:
            values, weights = zip(*(theirs[name] for theirs in every), strict=True)
            if not (self._weighted and any(weights)):
                logs[name] = float(np.mean(values))
            elif name.removeprefix("val_") in roots:
                logs[name] = float(np.sqrt(np.average(np.square(values), weights=weights)))
            else:
                logs[name] = float(np.average(values, weights=weights))

    def _counts(self) -> dict[str, float]:
        """Return the samples that the model's means have counted since the last reset of its metrics, by name."""
        return {name: float(keras.ops.convert_to_numpy(mean.count)) for name, mean in self._means().items()}

    def _means(self) -> dict[str, keras.metrics.Mean]:
        """Return the model's metrics that are means, by their names in the logs."""
        kind, means = generation_of(self.model).library.metrics.Mean, dict[str, keras.metrics.Mean]()
        # On TensorFlow, Keras 3 counts batches, not samples, for the losses of single outputs.
        losses = [id(each) for each in getattr(getattr(self.model, "_compile_loss", None), "metrics", ())]
        for metric in self.model.metrics:
            for name, each in named_metrics(metric):
                if isinstance(each, kind) and id(each) not in losses:
                    means.setdefault(name, each)
        return means


def named_metrics(metric: keras.metrics.Metric) -> list[tuple[str, keras.metrics.Metric]]:
    """Return the metrics within `metric` by their names in the logs: Keras 3 has those of compile() in one metric."""
    held = getattr(metric, "metrics", None)
    if not held:
        return [(metric.name, metric)]
    # The names in the logs begin with the output's, or with "weighted". Both lists have the same order.
    results = metric.result()
    names = list(results) if isinstance(results, dict) and len(results) == len(held) else [each.name for each in held]
    return list(zip(names, held, strict=True))


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) or (isinstance(value, np.ndarray) and value.ndim == 0)
