"""The loaders of `horovod.spark.data_loaders`: batches of tensors of a Petastorm reader, in epochs of a few steps."""

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

from farandole.compat.data_loader import AsyncDataLoaderMixin, BaseDataLoader
from farandole.data import Reader
from farandole.errors import ConfigError, ReaderError
from farandole.torch.data import BatchedDataLoader, InMemBatchedDataLoader

__all__ = [
    "PytorchAsyncDataLoader",
    "PytorchDataLoader",
    "PytorchInfiniteAsyncDataLoader",
    "PytorchInfiniteDataLoader",
    "PytorchInmemAsyncDataLoader",
    "PytorchInmemDataLoader",
]

log = logging.getLogger(__name__)


class PytorchDataLoader(BaseDataLoader):
    """Loader whose epochs are passes over a reader, each of at most `limit_step_per_epoch` batches; -1: no limit.

    Its length is the limit, or 0 without one. `name` and `verbose` are for logs."""

    def __init__(
        self,
        reader: Reader,
        batch_size: int,
        shuffling_queue_capacity: int,
        name: str = "",
        limit_step_per_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if limit_step_per_epoch < -1:
            raise ConfigError("limit_step_per_epoch", f"must be -1 or >= 0, got {limit_step_per_epoch}")
        self.reader, self.batch_size, self.shuffling_queue_capacity = reader, batch_size, shuffling_queue_capacity
        self.limit_step_per_epoch, self.name, self.verbose = limit_step_per_epoch, name, verbose
        self.data_loader = BatchedDataLoader(
            reader, batch_size=batch_size, shuffling_queue_capacity=shuffling_queue_capacity
        )

    def __len__(self) -> int:
        return max(0, self.limit_step_per_epoch)

    def _iterate(self) -> Iterator[object]:
        return self._limited(iter(self.data_loader))

    def _limited(self, batches: Iterator[object]) -> Iterator[object]:
        if self.verbose:
            log.info("[%s]: an epoch begins; limit_step_per_epoch=%d", self.name, self.limit_step_per_epoch)
        return batches if self.limit_step_per_epoch == -1 else islice(batches, self.limit_step_per_epoch)


class PytorchAsyncDataLoader(AsyncDataLoaderMixin, PytorchDataLoader):
    """`PytorchDataLoader` that makes batches ahead; its first arguments are those of `AsyncDataLoaderMixin`."""


class PytorchInfiniteDataLoader(PytorchDataLoader):
    """`PytorchDataLoader` whose epochs continue one endless pass; refuses a reader with an end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.reader.num_epochs is not None:
            raise ConfigError("num_epochs", f"of the reader must be None, for no end, got {self.reader.num_epochs}")
        self.iterator = iter(self.data_loader)

    def _iterate(self) -> Iterator[object]:
        return self._limited(self.iterator)


class PytorchInfiniteAsyncDataLoader(AsyncDataLoaderMixin, PytorchInfiniteDataLoader):
    """`PytorchInfiniteDataLoader` that makes batches ahead. An epoch that is left early takes those with it."""


class PytorchInmemDataLoader(BaseDataLoader):
    """Loader of `num_epochs` epochs of the first `batch_size * limit_step_per_epoch` rows, which stay in memory.

    Making one blocks until it has read the rows, and stops the reader. One epoch more raises `ReaderError`. `verbose`
    has no effect."""

    def __init__(
        self,
        reader: Reader,
        batch_size: int,
        num_epochs: int,
        name: str = "",
        shuffle: bool = False,
        limit_step_per_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if limit_step_per_epoch < 1:
            raise ConfigError("limit_step_per_epoch", f"must be >= 1 for rows in memory, got {limit_step_per_epoch}")
        self.batch_size, self.limit_step_per_epoch, self.name = batch_size, limit_step_per_epoch, name
        self.dataloader = InMemBatchedDataLoader(
            reader,
            batch_size=batch_size,
            num_epochs=num_epochs,
            rows_capacity=batch_size * limit_step_per_epoch,
            shuffle=shuffle,
        )
        self.iterator = iter(self.dataloader)

    def __len__(self) -> int:
        return self.limit_step_per_epoch

    def _iterate(self) -> Iterator[object]:
        for _ in range(self.limit_step_per_epoch):
            batch = next(self.iterator, None)
            if batch is None:
                raise ReaderError(f"[{self.name}]: all batches of its num_epochs were taken; give a larger num_epochs")
            yield batch


class PytorchInmemAsyncDataLoader(AsyncDataLoaderMixin, PytorchInmemDataLoader):
    """`PytorchInmemDataLoader` that makes batches ahead. An epoch that is left early takes those with it."""
