"""Curves for TensorBoard: `with EventFile(folder) as events: events.scalars({"loss": 0.3}, step)`."""

# The writer itself is in core, because the Spark estimators, which may not import integrations, write event files too.
from typing import Protocol

from farandole.core.default import metrics
from farandole.event_file import EventFile

__all__ = ["EventFile", "write_metrics"]


class Writer(Protocol):
    """The methods that PyTorch's `SummaryWriter` and tensorboardX's have in common."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


def write_metrics(events: EventFile | Writer, step: int) -> None:
    """Add this rank's metrics, as `farandole.torch.metrics()` returns them, to the curves `farandole/<name>`.

    Raises `NotInitializedError` before `init()`."""
    values = {f"farandole/{name}": value for name, value in metrics().items()}
    if isinstance(events, EventFile):
        events.scalars(values, step)
        return
    for tag, value in values.items():
        events.add_scalar(tag, value, step)
