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

    A metric that is a mean counts for each rank as the samples, or weights of samples, that it has seen there. Others,
    such as AUC, count as the samples of the loss. Where Keras has counted none, as with a train_step that returns
    values of its own, and with `weighted=False`, as in Horovod, all ranks count alike.

    Callbacks after it in `fit`'s list see the average, callbacks before it the rank's own values. `device` is an
    argument of Horovod's and is ignored."""

    def __init__(self, device: str = "", *, weighted: bool = True) -> None:
        super().__init__()
        self._weighted = weighted
        self._trained: dict[str, float] | None = None  # the counts of the epoch's training, once it is validated

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Forget the counts of the last epoch."""
        self._trained = None

    def on_test_begin(self, logs: object = None) -> None:
        """Note how many samples the training has counted, before the validation counts its own."""
        if self._trained is None:
            self._trained = self._counts()

    def on_epoch_end(self, epoch: int, logs: dict[str, SupportsFloat] | None = None) -> None:
        """Average the logs. Blocks until every rank takes part; raises `ValueError` if ranks have different metrics."""
        if logs is None:
            return
        last = self._counts()
        counts = last if self._trained is None else self._trained | {f"val_{name}": last[name] for name in last}
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
        for name in mine:
            values, weights = zip(*(theirs[name] for theirs in every), strict=True)
            logs[name] = float(np.average(values, weights=weights if self._weighted and any(weights) else None))

    def _counts(self) -> dict[str, float]:
        """Return the samples that the model's means have counted since the last reset of its metrics, by name."""
        kind, counts = generation_of(self.model).library.metrics.Mean, dict[str, float]()
        for metric in self.model.metrics:
            for each in getattr(metric, "metrics", None) or [metric]:  # Keras 3 has those of compile() in one metric
                if isinstance(each, kind):
                    counts.setdefault(each.name, float(keras.ops.convert_to_numpy(each.count)))
        return counts


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) or (isinstance(value, np.ndarray) and value.ndim == 0)
