"""Report of an epoch: means over all rows, speed, and rank 0's TensorBoard curves."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from farandole.estimators.history import epoch_points
from farandole.estimators.store import FilesystemStore
from farandole.estimators.trainers.mirror import StoredFolder
from farandole.event_file import EventFile

Record: TypeAlias = dict[str, float]  # the values of one epoch: "epoch", "loss", "val_loss", "seconds", ...


class Meter:
    """Sums of an epoch's values on this rank, and their means over all ranks."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.rows = 0
        self._sums = [0.0] * len(names)
        self._waited = 0.0
        self._started = time.perf_counter()
        self.wait = 0.0  # seconds spent waiting for the last batch

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        before = time.perf_counter()
        yield
        self.count_waiting(time.perf_counter() - before)

    def count_waiting(self, seconds: float) -> None:
        """Count `seconds` as waiting for data."""
        self.wait = seconds
        self._waited += seconds

    def add(self, rows: int, means: Sequence[float]) -> None:
        """Add a batch, given the mean of each value over its rows."""
        self.rows += rows
        self._sums = [total + rows * mean for total, mean in zip(self._sums, means, strict=True)]

    def over_ranks(self, sum_over_ranks: Callable[[list[float]], list[float]], size: int) -> tuple[Record, Record]:
        """Return the means over the rows of all ranks, and the epoch's seconds and speed. A collective."""
        seconds = time.perf_counter() - self._started
        *sums, rows, seconds, waited = sum_over_ranks([*self._sums, float(self.rows), seconds, self._waited])
        means = {name: total / rows for name, total in zip(self._names, sums, strict=True)}
        return means, {"seconds": seconds / size, "rows_per_s": rows * size / seconds, "waited": waited / seconds}


class Curves:
    """Rank 0's TensorBoard file, in the store; a remote store gets a copy after each epoch."""

    def __init__(self, store: FilesystemStore, run_id: str) -> None:
        self._folder = StoredFolder(store, store.get_logs_path(run_id))
        self._events = EventFile(self._folder.path)

    def add_step(self, loss: float, step: int) -> None:
        """Add the loss of one of rank 0's batches."""
        self._events.scalars({"train/batch_loss": loss}, step)

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Add points to curves by their names."""
        self._events.scalars(values, step)

    def add_epoch(self, record: Mapping[str, float], step: int) -> None:
        """Add an epoch's values; flush the file, and copy it to a remote store."""
        self._events.scalars(epoch_points(record), step)
        self._events.flush()
        self._folder.push()

    def close(self) -> None:
        """Close the file; a remote store keeps the copy from the last finished epoch."""
        self._events.close()
        self._folder.close()
