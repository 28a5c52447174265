"""Values of a fit's epochs: a list, its curves, its view in a notebook, and their way to loggers."""

import html
import io
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from farandole.extras import importing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

# Values of an epoch that are neither losses nor metrics.
NO_SCORES = ("epoch", "steps", "seconds", "rows_per_s", "waited")
_INCHES = (4.0, 2.6)  # of one panel: width, height


class EpochLogger(Protocol):
    """Receiver of the values of each finished epoch, on the driver; one of an estimator's `loggers`."""

    def log_epoch(self, record: Mapping[str, float]) -> None:
        """Log an epoch's values: "epoch", counted from 1, "loss", "val_loss", "seconds", "rows_per_s", ..."""
        ...


class EpochLog:
    """Passes each epoch of a fit to all loggers once, on its own thread, so that a slow server does not delay training.

    An exception of a logger is logged, and training continues. The context's end blocks until all loggers have all
    epochs, or after an error only until they have the epoch that they are logging."""

    def __init__(self, loggers: Sequence[EpochLogger]) -> None:
        self._loggers = loggers
        self._seen: set[float] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="farandole-epochs")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.shutdown(cancel_futures=error is not None)

    def add(self, record: Mapping[str, float]) -> None:
        """Log an epoch, unless it has been added before; does not block."""
        if self._loggers and record["epoch"] not in self._seen:
            self._seen.add(record["epoch"])
            self._thread.submit(self._log, dict(record))

    def _log(self, record: Mapping[str, float]) -> None:
        for logger in self._loggers:
            try:
                logger.log_epoch(record)
            except Exception:
                log.exception("%s has failed with the values of epoch %d", type(logger).__name__, record["epoch"])


def epoch_points(record: Mapping[str, float]) -> dict[str, float]:
    """Return an epoch's values by the names of their curves, such as "train/loss" and "validation/loss"."""
    points = {"train/rows_per_s": record["rows_per_s"], "train/waiting_for_data_percent": 100 * record["waited"]}
    for name, value in record.items():
        if name.startswith("val_"):
            points[f"validation/{name.removeprefix('val_')}"] = value
        elif name not in NO_SCORES:
            points[f"train/{name}"] = value
    return points


class History(list[dict[str, float]]):
    """List with one record per epoch; a notebook shows it as curves and a table."""

    def plot(self) -> "Figure":
        """Draw each value over the epochs, training and validation in one panel.

        The figure belongs to no window: show it in a notebook, or write it with `savefig`. Raises `MissingExtra`
        without Matplotlib."""
        with importing(__name__):
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator
        panels = self._panels()
        figure = Figure(figsize=(_INCHES[0] * max(1, len(panels)), _INCHES[1]), layout="constrained")
        for place, (title, names) in enumerate(panels.items()):
            axes = figure.add_subplot(1, len(panels), place + 1)
            axes.set_title(title)
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            for name in names:
                records = [record for record in self if name in record]
                label = "validation" if name.startswith("val_") else "train"
                epochs, values = [record["epoch"] for record in records], [record[name] for record in records]
                axes.plot(epochs, values, marker="o", markersize=3, label=label)
            axes.legend()
        return figure

    def _panels(self) -> dict[str, list[str]]:
        """Return the names of values by the panel that they share."""
        panels: dict[str, list[str]] = {}
        for name in dict.fromkeys(name for record in self for name in record):
            if name not in NO_SCORES:
                panels.setdefault(name.removeprefix("val_"), []).append(name)
        return panels

    def _repr_html_(self) -> str:
        return self._picture() + _table(self)

    def _picture(self) -> str:
        if not self:
            return ""
        try:
            figure = self.plot()
        except ModuleNotFoundError as error:
            return f"<p>{html.escape(str(error))}</p>"
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg")
        svg = drawn.getvalue()
        return svg[svg.index("<svg") :]


def _table(records: Sequence[Mapping[str, float]]) -> str:
    names = list(dict.fromkeys(name for record in records for name in record))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = "".join(f"<tr>{''.join(_cell(record.get(name)) for name in names)}</tr>" for record in records)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(value: float | None) -> str:
    return f"<td>{'' if value is None else format(value, '.6g')}</td>"
