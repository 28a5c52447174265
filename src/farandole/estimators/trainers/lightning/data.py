"""A rank's rows as the loaders of a Lightning trainer."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from farandole.data import ShardBatch
from farandole.estimators.trainers.report import Meter
from farandole.estimators.trainers.run import Run
from farandole.estimators.trainers.torch.tensors import Inputs, label_tensor
from farandole.spark.driver.messages import log_to_driver

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Conversion of columns to the batch of a `LightningModule`: a dictionary of tensors by column."""

    inputs: Inputs
    label_cols: tuple[str, ...]
    label_shapes: tuple[tuple[int, ...], ...] | None
    weight_col: str | None

    def of(self, batch: ShardBatch) -> dict[str, Tensor]:
        """Return features, labels and weights; floating-point labels in the type of the model's parameters."""
        columns = batch.columns
        given = {name: self.inputs.tensor(place, columns[name]) for place, name in enumerate(self.inputs.columns)}
        for place, name in enumerate(self.label_cols):
            shape = None if self.label_shapes is None else self.label_shapes[place]
            given[name] = label_tensor(columns[name], self.inputs.dtype, shape)
        if self.weight_col is not None:
            given[self.weight_col] = torch.from_numpy(columns[self.weight_col]).to(self.inputs.dtype)
        return given


class Loader:
    """Iterable of a known number of batches; each pass calls `batches` anew."""

    def __init__(self, batches: Callable[[], Iterator[ShardBatch]], length: int, tensors: Tensors, run: Run) -> None:
        self._batches, self._length, self._tensors, self._run = batches, length, tensors, run
        self.meter: Meter | None = None  # counts the seconds that the trainer waits for batches
        self.queue = 0  # batches that are made ahead
        self.name = ""  # name in debugging messages; "": no messages

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        source = self._made()
        if self.queue:
            source = ahead(source, self.queue)
        if self.meter is None:
            yield from source
            return
        for _ in range(self._length):
            with self.meter.waiting():
                batch = next(source)
            yield batch

    def _made(self) -> Iterator[dict[str, Tensor]]:
        for step, batch in enumerate(self._batches()):
            made = self._tensors.of(batch if batch.rows else self._run.stand_in())
            if self.name:
                shapes = ", ".join(f"{name} {list(each.shape)}" for name, each in made.items())
                log_to_driver(f"{self.name} batch {step} of rank {self._run.rank}: {batch.rows} rows, {shapes}")
            yield made


def ahead(source: Iterator[T], length: int) -> Iterator[T]:
    """Yield the values of `source`. A thread makes up to `length` of them ahead; it ends with the iterator."""
    ended = object()
    with ThreadPoolExecutor(1, thread_name_prefix="farandole-ahead") as thread:
        waiting: deque[Future[Any]] = deque(thread.submit(next, source, ended) for _ in range(length))
        try:
            while (value := waiting.popleft().result()) is not ended:
                waiting.append(thread.submit(next, source, ended))
                yield value
        finally:
            for each in waiting:
                each.cancel()


def queue_length(asked: float | None, steps: int) -> int:
    """Return how many batches to make ahead: a whole number, or a share of the steps of an epoch."""
    if not asked:
        return 0
    return asked if isinstance(asked, int) else max(1, int(asked * steps))
