"""Curves for TensorBoard: `with EventFile(folder) as events: events.scalars({"loss": 0.3}, step)`."""

# EventFile is in another module, because the Spark estimators use it too and may not import integrations.
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from farandole.core.default import metrics
from farandole.estimators.history import epoch_points
from farandole.event_file import EventFile

__all__ = ["EventFile", "TensorBoardLogger", "write_metrics"]


class Writer(Protocol):
    """The methods that PyTorch's `SummaryWriter` and tensorboardX's have in common."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


def write_metrics(events: EventFile | Writer, step: int) -> None:
    """Add this rank's metrics, the result of `farandole.torch.metrics()`, to the curves `farandole/<name>`.

    Raises `NotInitializedError` before `init()`."""
    values = {f"farandole/{name}": value for name, value in metrics().items()}
    if isinstance(events, EventFile):
        events.scalars(values, step)
        return
    for tag, value in values.items():
        events.add_scalar(tag, value, step)


class TensorBoardLogger:
    """Logger that writes the values of each epoch to an event file on the driver: `TorchEstimator(..., loggers=[...])`.

    The file is created at the first epoch. The epoch is the step of the curves. With a store, an estimator writes event
    files without a logger; these also have the values of each step."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._events: EventFile | None = None

    def log_epoch(self, record: Mapping[str, float]) -> None:
        """Write and flush an epoch's values. Raises `OSError`."""
        if self._events is None:
            self._events = EventFile(self._folder)
        self._events.scalars(epoch_points(record), int(record["epoch"]))
        self._events.flush()

    def close(self) -> None:
        """Close the file; the next epoch creates another one."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def __getstate__(self) -> dict[str, object]:
        return {"_folder": self._folder, "_events": None}  # an estimator is saved with its loggers
