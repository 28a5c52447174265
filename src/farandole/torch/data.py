"""Batches of `farandole.data` as torch tensors, which share memory with them where torch can.

    loader = TensorLoader(Loader(ParquetSource(url), batch_size=32, policy="join", rank=hvd.rank(), size=hvd.size()))
    for batch in loader:
        loss = loss_of(model(batch["pixels"]), batch["label"]) * batch.weight

`DataLoader` and `BatchedDataLoader` take readers of `make_reader` and `make_batch_reader`, as Petastorm's do."""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from farandole.data import Loader, Ragged, Reader, SparseRows, Values, tensors
from farandole.data.loading.rounds import Columns
from farandole.data.loading.settings import check_count
from farandole.errors import ConfigError, DataError, ReaderError

__all__ = ["BatchedDataLoader", "DataLoader", "InMemBatchedDataLoader", "TensorBatch", "TensorLoader", "as_tensor"]


def as_tensor(name: str, values: Values) -> Tensor:
    """Return a column as a tensor.

    Numbers and arrays share memory. Times become int64 in their own unit, since 1970. Arrays of different lengths
    become a nested tensor, sparse vectors a sparse COO tensor. Raises `DataError` for texts and bytes.
    """
    if isinstance(values, Ragged):
        offsets = torch.from_numpy(values.offsets)
        return torch.nested.nested_tensor_from_jagged(as_tensor(name, values.values), offsets)
    if isinstance(values, SparseRows):
        rows = np.repeat(np.arange(len(values)), np.diff(values.offsets))
        places = torch.from_numpy(np.stack([rows, values.indices]))
        return torch.sparse_coo_tensor(
            places, torch.from_numpy(values.values), (len(values), values.width), check_invariants=False
        )
    if values.dtype.kind in "mM":
        values = values.view(np.int64)
    if values.dtype.kind == "O":
        raise DataError(
            name, "texts and bytes have no tensor; give a vocabulary, decode them in a transform, or leave them out"
        )
    return torch.from_numpy(values)


TensorBatch: TypeAlias = tensors.TensorBatch[Tensor]


class TensorLoader(tensors.TensorLoader[Tensor]):
    """A `Loader` or `FeedLoader` that yields `TensorBatch`; its other methods are the loader's.

    Raises `DataError` for a column that no tensor can hold."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader, as_tensor)


class BatchedDataLoader:
    """Loader of `batch_size` rows of a reader, as dictionaries of tensors; the last batch is smaller.

    Each iteration is a pass over all epochs of the reader from the first row, even if the last one was left early; it
    ends that one.
    `transform_fn` makes a tensor of a column's array. Rows come in the reader's order, which shuffles at least
    `shuffling_queue_capacity` rows together; with `shuffle_row_groups=False` these are consecutive rows. Leaving a
    `with` block stops the reader."""

    def __init__(
        self,
        reader: Reader,
        batch_size: int = 1,
        transform_fn: Callable[[Values], Tensor] | None = None,
        shuffling_queue_capacity: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ConfigError("batch_size", f"must be >= 1, got {batch_size}")
        if shuffling_queue_capacity < 0:
            raise ConfigError("shuffling_queue_capacity", f"must be >= 0, got {shuffling_queue_capacity}")
        if shuffling_queue_capacity:
            reader.loader.shuffle_within(shuffling_queue_capacity)
        self.reader, self.batch_size, self._transform = reader, batch_size, transform_fn

    def __iter__(self) -> Iterator[Any]:
        yield from map(self._collate, self.reader.batches_of(self.batch_size))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.reader.stop()

    def _collate(self, columns: Columns) -> object:
        if self._transform is not None:
            return {name: self._transform(values) for name, values in columns.items()}
        return {name: as_tensor(name, values) for name, values in columns.items()}


class DataLoader(BatchedDataLoader):
    """`BatchedDataLoader` with an optional `collate_fn`, which makes a batch of a list of rows, each a dictionary."""

    def __init__(
        self,
        reader: Reader,
        batch_size: int = 1,
        collate_fn: Callable[[list[dict[str, object]]], object] | None = None,
        shuffling_queue_capacity: int = 0,
    ) -> None:
        super().__init__(reader, batch_size, shuffling_queue_capacity=shuffling_queue_capacity)
        self._collate_rows = collate_fn

    def _collate(self, columns: Columns) -> object:
        if self._collate_rows is None:
            return super()._collate(columns)
        cells = {name: values.rows() if isinstance(values, Ragged) else values for name, values in columns.items()}
        cells = {name: values.dense() if isinstance(values, SparseRows) else values for name, values in cells.items()}
        return self._collate_rows([dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)])


class InMemBatchedDataLoader:
    """Loader of `num_epochs` epochs of the first `rows_capacity` rows of a reader, which stay in memory as tensors.

    Making one blocks until it has read the rows, and stops the reader. `transform_fn` makes a tensor of a column's
    array, once. With `shuffle`, the order of an epoch is a function of `seed` and the epoch's number. Iterating a
    second time raises `ReaderError`. Raises `DataError` for rows of different shapes."""

    def __init__(
        self,
        reader: Reader,
        batch_size: int = 1,
        transform_fn: Callable[[Values], Tensor] | None = None,
        num_epochs: int = 1,
        seed: int = 0,
        rows_capacity: int = 1024,
        shuffle: bool = False,
    ) -> None:
        for name, value in {"batch_size": batch_size, "num_epochs": num_epochs, "rows_capacity": rows_capacity}.items():
            check_count(name, value, 1)
        self._batch_size, self._num_epochs, self._seed, self._shuffle = batch_size, num_epochs, seed, shuffle
        with BatchedDataLoader(reader, rows_capacity, transform_fn) as whole:
            self._columns: dict[str, Tensor] = next(iter(whole), {})
        for name, values in self._columns.items():
            if values.layout != torch.strided or values.is_nested:
                raise DataError(name, "rows in memory must have one shape; pad or cut them in a transform")
        self._used = False

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if self._used:
            raise ReaderError("this loader can be iterated over once; give the number of epochs as num_epochs")
        self._used = True
        count = len(next(iter(self._columns.values()), ()))
        for epoch in range(self._num_epochs):
            rows = torch.arange(count)
            if self._shuffle:
                rows = torch.randperm(count, generator=torch.Generator().manual_seed(self._seed + epoch))
            for chosen in rows.split(self._batch_size):
                yield {name: values[chosen] for name, values in self._columns.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Do nothing: the reader was stopped when its rows were read."""
