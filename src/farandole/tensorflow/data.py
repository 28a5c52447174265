"""Batches of `farandole.data` as TensorFlow tensors, for custom loops and as a `tf.data.Dataset`.

    loader = Loader(ParquetSource(url), batch_size=32, policy="pad", rank=hvd.rank(), size=hvd.size())
    dataset = make_dataset(loader).map(lambda columns: (columns["pixels"], columns["label"]))
    model.fit(dataset, epochs=10)

`make_petastorm_dataset` takes readers of `make_reader` and `make_batch_reader`, as Petastorm's does.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from farandole.core.context import Context
from farandole.core.default import context, is_initialized, use
from farandole.data import Batch, Loader, Ragged, Reader, SparseRows, Values, tensors
from farandole.data.loading.rounds import Columns
from farandole.data.loading.values import ALIGNMENT
from farandole.errors import ConfigError, DataError

__all__ = ["TensorBatch", "TensorLoader", "as_tensor", "make_batched_dataset", "make_dataset", "make_petastorm_dataset"]

Tensor: TypeAlias = tf.Tensor | tf.RaggedTensor | tf.SparseTensor
TensorBatch: TypeAlias = tensors.TensorBatch[Tensor]
# A column as plain arrays: (array,); (values, offsets) of a ragged one; (values, places, shape) of a sparse one.
Parts: TypeAlias = tuple[NDArray[np.generic], ...]


def as_tensor(name: str, values: Values) -> Tensor:
    """Return a column as a tensor.

    Numbers and arrays share memory if it has TensorFlow's alignment, as memory of large rows has. Times become int64 in
    their own unit, since 1970; strings and bytes become string tensors. Arrays of different lengths become a
    RaggedTensor, sparse vectors a SparseTensor. Raises `DataError` for a column of other objects.
    """
    return _whole([_share(part) for part in _parts(name, values)])


class TensorLoader(tensors.TensorLoader[Tensor]):
    """A `Loader` or `FeedLoader` that yields `TensorBatch`; its errors and its state are those of the loader.

    Raises `DataError` for a column that no tensor can hold."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader, as_tensor)


def make_dataset(loader: Loader, *, weights: str | None = None) -> tf.data.Dataset:
    """Return a dataset of batches, each a dictionary of columns; each iteration yields the rest of an epoch.

    `weights` is the name of a float32 column to add, with each row's weight. With policy "join" the average over ranks
    of weighted means is then the mean over the step's rows. Rows that policy "pad" repeats weigh 0, and count in means.
    The loader's state is that of the last yielded batch, unless batches are prefetched; the loader reads ahead by
    itself, so `prefetch` gains little. An error of the loader is raised as one of `tf.errors` with its class and text.
    Blocks while it runs a transform on a sample to get the types; raises `DataError` for a column that no tensor can
    hold.
    """
    sample = loader.sample()
    if weights is not None:
        if weights in sample:
            raise ConfigError("weights", f"there is a column '{weights}' already; choose another name")
        sample = {**sample, weights: np.empty(0, np.float32)}

    here = context() if is_initialized() else None

    def batches() -> Iterator[Columns]:
        for batch in loader if here is None else _as_rank(here, iter(loader)):
            if weights is not None:
                batch[weights] = _weights(batch)
            yield batch

    return _dataset(batches, sample, loader.batch_rows)


def make_petastorm_dataset(reader: Reader) -> tf.data.Dataset:
    """Return a dataset of a reader's rows as named tuples; of its batches for a reader of `make_batch_reader`.

    Each iteration is a pass over all epochs of the reader from the first row, even if the last one was left early.
    Raises the errors of `make_dataset`."""
    dataset = make_batched_dataset(reader, None)
    return dataset if reader.batched_output else split_into_rows(dataset)


def split_into_rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset of the rows of a dataset of batches, for columns of any shape."""
    # TensorFlow's `unbatch` (2.21) ends the process by SIGSEGV where a row is an array of length 0.
    return dataset.flat_map(tf.data.Dataset.from_tensor_slices)


def make_batched_dataset(reader: Reader, batch_size: int | None) -> tf.data.Dataset:
    """Return a dataset of named tuples of `batch_size` rows of a reader; the last one is smaller.

    With None it yields the reader's own batches."""
    if batch_size is not None and batch_size < 1:
        raise ConfigError("batch_size", f"must be >= 1, got {batch_size}")
    sample = reader.loader.sample()
    record = reader.record(sample)

    def batches() -> Iterator[Columns]:
        yield from reader.batches() if batch_size is None else reader.batches_of(batch_size)

    return _dataset(batches, sample, None).map(lambda columns: record(*(columns[name] for name in sample)))


def _as_rank(here: Context, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield batches with `here` as the default context, on the thread of TensorFlow that requests them."""
    while True:
        with use(here):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _dataset(batches: Callable[[], Iterator[Columns]], sample: Columns, rows: int | None) -> tf.data.Dataset:
    """Make a dataset of columns with the types of `sample`, and with `rows` rows each unless that is None."""
    like = {name: _parts(name, values) for name, values in sample.items()}

    def split_batches() -> Iterator[dict[str, Parts]]:
        for columns in batches():
            yield {name: _parts(name, columns[name], parts) for name, parts in like.items()}

    specs = {name: tuple(_spec(part, rows, parts) for part in parts) for name, parts in like.items()}
    dataset = tf.data.Dataset.from_generator(split_batches, output_signature=specs)
    dataset = dataset.map(lambda columns: {name: _whole(parts) for name, parts in columns.items()})
    options = tf.data.Options()
    # Rows are sharded over ranks already, and the loader counts a batch in a buffer as yielded.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    return dataset.with_options(options)


def _parts(name: str, values: Values, like: Parts | None = None) -> Parts:
    """Split a column into its parts; raises `DataError` if their dtypes differ from those of `like`."""
    parts: Parts
    if isinstance(values, Ragged):
        parts = (_numbers(values.values), values.offsets)
    elif isinstance(values, SparseRows):
        rows = np.repeat(np.arange(len(values)), np.diff(values.offsets))
        places = np.stack([rows, values.indices], axis=1)
        parts = (values.values, places, np.array([len(values), values.width]))
    else:
        parts = (_numbers(values),)
        if values.dtype.kind == "O" and len(values) and not isinstance(values[0], (str, bytes)):
            raise DataError(name, f"no tensor holds objects of {type(values[0]).__name__}; leave it out")
    if like is not None and [part.dtype for part in parts] != [part.dtype for part in like]:
        was, now = (", ".join(str(part.dtype) for part in each) for each in (like, parts))
        raise DataError(name, f"was of {was} in the first rows, and is of {now} now; name its type in the transform")
    return parts


def _numbers(values: NDArray[np.generic]) -> NDArray[np.generic]:
    return values.view(np.int64) if values.dtype.kind in "mM" else values


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensor of a column from the tensors of its parts."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:
        return tf.RaggedTensor.from_row_splits(parts[0], parts[1], validate=False)
    return tf.SparseTensor(parts[1], parts[0], parts[2])


def _spec(part: NDArray[np.generic], rows: int | None, parts: Parts) -> tf.TensorSpec:
    kind = tf.string if part.dtype.kind in "OUS" else tf.as_dtype(part.dtype)
    if len(parts) == 3 and part is parts[2]:
        return tf.TensorSpec(part.shape, kind)
    # Only a plain array has as many rows as the batch.
    return tf.TensorSpec((rows if len(parts) == 1 else None, *part.shape[1:]), kind)


def _share(part: NDArray[np.generic]) -> Tensor:
    """Return a tensor over an array's memory, or over a copy.

    TensorFlow accepts memory that is not aligned, but aborts the process when it uses it."""
    plain = part.size and part.dtype.kind in "biufc" and part.flags.c_contiguous and part.flags.writeable
    if plain and part.__array_interface__["data"][0] % ALIGNMENT == 0:
        return tf.experimental.dlpack.from_dlpack(part.__dlpack__())  # type: ignore[misc]  # it holds numbers
    return tf.convert_to_tensor(part)


def _weights(batch: Batch) -> NDArray[np.float32]:
    weights = np.full(batch.rows, batch.weight, np.float32)
    weights[batch.rows - batch.repeated :] = 0
    return weights
