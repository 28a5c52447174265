"""Callback that averages metrics over ranks."""

import numbers
from typing import Any

import numpy as np

from farandole.core.operations.objects import allgather_object
from farandole.keras.callbacks.base import Callback

__all__ = ["MetricAverageCallback"]


class MetricAverageCallback(Callback):
    """Replaces the metrics of an epoch, including those of validation, with their average over all ranks.

    Callbacks after it in `fit`'s list see the average, callbacks before it the rank's own values. `device` is an
    argument of Horovod's and is ignored."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the logs. Blocks until every rank takes part; raises `ValueError` if ranks have different metrics."""
        if logs is None:
            return
        mine = {name: float(value) for name, value in logs.items() if _is_number(value)}
        every = allgather_object(mine, name="metrics")
        for rank, theirs in enumerate(every):
            if theirs.keys() != mine.keys():
                differing = ", ".join(sorted(theirs.keys() ^ mine.keys()))
                raise ValueError(
                    f"rank {rank} has other metrics than this one ({differing}): compile, and validate, on all alike"
                )
        logs.update({name: float(np.mean([theirs[name] for theirs in every])) for name in mine})


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) or (isinstance(value, np.ndarray) and value.ndim == 0)
