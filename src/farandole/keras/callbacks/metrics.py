"""Makes metrics those of all ranks."""

import numbers
from typing import Any

import numpy as np

from farandole.core.objects import allgather_object
from farandole.keras.callbacks.base import Callback

__all__ = ["MetricAverageCallback"]


class MetricAverageCallback(Callback):
    """Replaces an epoch's metrics, those of the validation too, by their average over all ranks.

    The callbacks behind it in `fit`'s list see the average, those before it their own rank's. `device` is Horovod's,
    and has no meaning here."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average; blocks until every rank has come. Raises `ValueError` when ranks have different metrics."""
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
