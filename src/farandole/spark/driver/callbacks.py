"""Callback that sends messages of a rank's Keras training to the driver."""

import time
from collections.abc import Mapping

from farandole.keras.callbacks.base import CallbackOfBoth
from farandole.spark.driver.messages import log_to_driver


class LogCallback(CallbackOfBoth):
    """Shows the begin, end and metrics of epochs in the driver's output; with `per_batch_log` also batches' metrics.

    Every rank that trains with it sends these messages, by `farandole.spark.log_to_driver`."""

    def __init__(self, per_batch_log: bool = False) -> None:
        super().__init__()
        self.per_batch_log = per_batch_log
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Report that the epoch begins."""
        self._began = time.monotonic()
        log_to_driver(f"Epoch {epoch} begins.")

    def on_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Report the batch's metrics, with `per_batch_log`."""
        if self.per_batch_log:
            log_to_driver(f"Batch {batch}: {_spelled(logs)}")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Report the epoch's metrics and duration."""
        log_to_driver(f"Epoch {epoch} ended after {time.monotonic() - self._began:.1f} s: {_spelled(logs)}")


def _spelled(logs: Mapping[str, float] | None) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in (logs or {}).items())
