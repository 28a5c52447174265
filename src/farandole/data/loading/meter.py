"""Speed of reading, and the share of time that a rank waits for rows."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Measurements of one rank's epoch, or of the part that it has read so far; times are in seconds."""

    epoch: int
    rows: int
    steps: int
    seconds: float
    waited: float

    @property
    def rows_per_second(self) -> float:
        """Rows of this rank per second."""
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def waiting(self) -> float:
        """The share of time that the rank waited for data, in percent."""
        return 100 * self.waited / self.seconds if self.seconds else 0.0

    def scalars(self) -> dict[str, float]:
        """Return speed and waiting by the names of their curves in event files."""
        return {"data/rows_per_second": self.rows_per_second, "data/waiting_percent": self.waiting}

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}: {self.rows} rows in {self.steps} steps and {self.seconds:.3g} s, "
            f"{self.rows_per_second:.4g} rows/s, waiting for data {self.waiting:.1f} %"
        )


class Meter:
    """Stopwatch of one epoch, started when it is made; the reader counts `rows` and `steps`."""

    def __init__(self, epoch: int) -> None:
        self.rows = self.steps = 0
        self._epoch = epoch
        self._began = time.monotonic()
        self._ended: float | None = None
        self._waited = 0.0

    def stop(self) -> None:
        """Stop the time of the epoch."""
        self._ended = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the body as waiting."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - began

    @property
    def metrics(self) -> Metrics:
        """The measurements so far, or up to `stop`."""
        seconds = (time.monotonic() if self._ended is None else self._ended) - self._began
        return Metrics(epoch=self._epoch, rows=self.rows, steps=self.steps, seconds=seconds, waited=self._waited)
