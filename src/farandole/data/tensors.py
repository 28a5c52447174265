"""Loader of tensors for any framework: batches whose columns a function converts."""

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from farandole.data.loading.batches import Batch
from farandole.data.loading.loader import Loader
from farandole.data.loading.meter import Metrics
from farandole.data.loading.values import Values

T = TypeVar("T")


class TensorBatch(dict[str, T], Generic[T]):
    """A `Batch` whose columns are tensors, with the batch's `rows`, `weight` and `repeated`."""

    __slots__ = ("repeated", "rows", "weight")

    def __init__(self, batch: Batch, convert: Callable[[str, Values], T]) -> None:
        super().__init__({name: convert(name, values) for name, values in batch.items()})
        self.rows, self.weight, self.repeated = batch.rows, batch.weight, batch.repeated


class TensorLoader(Generic[T]):
    """A `Loader` or `FeedLoader` that yields `TensorBatch`; its other methods are the loader's.

    Making one raises the error of `convert` for a column that it cannot convert, unless a transform may replace the
    column."""

    def __init__(self, loader: Loader, convert: Callable[[str, Values], T]) -> None:
        self.loader, self._convert = loader, convert
        if not loader.transforms:
            for name, values in loader.sample().items():
                convert(name, values)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[TensorBatch[T]]:
        convert = self._convert
        return (TensorBatch(batch, convert) for batch in self.loader)

    def set_epoch(self, epoch: int) -> None:
        """See `Loader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """See `Loader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """See `Loader.load_state_dict`."""
        self.loader.load_state_dict(state)

    def resize(self, rank: int, size: int) -> None:
        """See `Loader.resize`."""
        self.loader.resize(rank, size)

    @property
    def metrics(self) -> Metrics | None:
        """See `Loader.metrics`."""
        return self.loader.metrics
