"""Report of a loader's reading speed and waiting time, to an event file and the timeline."""

from collections.abc import Callable

from farandole.core.default import context, is_initialized
from farandole.data import Metrics
from farandole.event_file import EventFile


def report_reading(events: EventFile | None = None) -> Callable[[Metrics], None]:
    """Return a function for the argument `report` of a `Loader`, which writes each epoch's metrics.

    It writes them to `events` with the epoch as step, and as curves to this rank's timeline, if one is being
    written."""

    def report(metrics: Metrics) -> None:
        if events is not None:
            events.scalars(metrics.scalars(), metrics.epoch)
            events.flush()
        if is_initialized():
            context().timeline.show("data", metrics.scalars())

    return report
