"""Messages from a rank to the driver's progress display while it trains."""

import time

from farandole.spark.driver.messages import send

REPORT_EVERY = 0.25  # seconds between two messages of a rank


class Progress:
    """Counter of a rank's steps, which reports its place to the driver a few times per second; never blocks.

    `HorovodRunner` and the estimators show the place. Outside a Spark job there is no driver, and nothing is sent.
    """

    def __init__(self, *, epochs: int, steps: int, epoch: int = 0) -> None:
        """Expect `steps` steps in each of `epochs` epochs, of which `epoch` are done already."""
        if steps < 1:
            raise ValueError(f"steps must be >= 1, got {steps}")
        self._epochs, self._steps = epochs, steps
        self._epoch, self._step = epoch + 1, 0
        self._rows = 0
        self._waited: float | None = None
        self._since = time.perf_counter()  # rows and waiting are counted from here
        self._loss = float("nan")

    def step(self, *, rows: int, loss: float | None = None, waited: float | None = None) -> None:
        """Count one finished step of `rows` rows, after a wait of `waited` seconds (None: unknown) for these rows."""
        if self._step == self._steps:
            self._epoch, self._step = self._epoch + 1, 0
        self._step += 1
        self._rows += rows
        if waited is not None:
            self._waited = (self._waited or 0.0) + waited
        self._loss = self._loss if loss is None else loss
        now = time.perf_counter()
        passed = now - self._since
        if passed >= REPORT_EVERY or self._step == self._steps:
            message: dict[str, object] = {"epoch": self._epoch, "epochs": self._epochs}
            message |= {"step": self._step, "steps": self._steps, "loss": self._loss, "rows_per_s": self._rows / passed}
            if self._waited is not None:
                message["waited"] = self._waited / passed
            send("progress", message)
            self._rows, self._waited, self._since = 0, None, now
