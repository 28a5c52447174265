"""Speed of reading and time spent waiting for data, where a rank's other measurements are."""

from collections.abc import Callable

from farandole.core.default import context, is_initialized
from farandole.data import Metrics
from farandole.event_file import EventFile

__all__ = ["report_reading"]


def report_reading(events: EventFile | None = None) -> Callable[[Metrics], None]:
    """Return a function for the `report` of a `Loader`: it writes each epoch to `events` and to this rank's timeline.

    In the event file a point stands at the number of its epoch; the timeline has curves, if one is being written."""

    def report(metrics: Metrics) -> None:
        if events is not None:
            events.scalars(metrics.scalars(), metrics.epoch)
            events.flush()
        if is_initialized():
            context().timeline.show("data", metrics.scalars())

    return report
