"""Result of `make_spark_converter`: a DataFrame's rows by Petastorm's names, on the driver and on ranks.

Imports no Spark, which ranks do not need."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Protocol, TypeAlias

from farandole import data
from farandole.core.default import context, is_initialized
from farandole.core.operations.objects import allgather_object
from farandole.errors import ConfigError
from farandole.spark.jobs.child import current_rank
from farandole.spark.rows.fed_rows import FedRows, open_rows, path_of_collected
from farandole.topology import JobEnvironment

# What users give for `make_batch_reader`, which checks it.
ReaderArguments: TypeAlias = Mapping[str, Any]

# Settings of Spark that name the folder of copies: farandole's, and Petastorm's, which existing programs set.
CACHE_SETTINGS = ("farandole.spark.converter.parentCacheDirUrl", "petastorm.spark.converter.parentCacheDirUrl")


class ConvertedRows(Protocol):
    """The source of a converter's rows."""

    @property
    def url(self) -> str | None:
        """The folder with the copy; None without one."""
        ...

    def files(self) -> list[str]:
        """Return the URLs of the copy's Parquet files; none without one."""
        ...

    def count(self) -> int:
        """Return the number of rows of all ranks together."""
        ...

    def read(self, options: ReaderArguments) -> "data.Reader":
        """Make a reader of batches; `options` are those of `make_batch_reader`."""
        ...

    def close(self) -> None:
        """Release the rows."""
        ...


class _Loading(AbstractContextManager[Any]):
    """Context of a loader or data set, which is closed at its end only.

    Programs call `__enter__` and drop the context; that of a generator would close the loader at once."""

    def __init__(self, load: Callable[[ExitStack], object]) -> None:
        self._load, self._stack = load, ExitStack()

    def __enter__(self) -> Any:
        with ExitStack() as stack:
            loaded = self._load(stack)
            self._stack = stack.pop_all()
        return loaded

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)


class SparkDatasetConverter:
    """A DataFrame's rows for the loaders of Petastorm's programs, also in the function of a `HorovodRunner`.

    Without a folder, a job whose function or arguments contain the converter feeds each rank its share of the rows. The
    share is the rank's shard: `cur_shard` and `shard_count` must be the rank and the number of ranks, and all ranks
    must make a loader together. On the driver the first loader collects the rows to local disk, as one shard.
    With a folder, any process that reaches it reads any shard.
    `delete` removes the files. Otherwise they are removed with the object that made them, at the latest when the
    driver's interpreter ends.
    """

    PARENT_CACHE_DIR_URL_CONF = CACHE_SETTINGS[1]  # by which Petastorm's programs set the folder

    def __init__(self, rows: ConvertedRows) -> None:
        self._rows = rows

    @property
    def cache_dir_url(self) -> str | None:
        """The folder with the copy; None without one."""
        return self._rows.url

    @property
    def file_urls(self) -> list[str]:
        """The URLs of the copy's Parquet files; empty without a folder."""
        return self._rows.files()

    @property
    def dataset_size(self) -> int:
        """The number of rows of all ranks together.

        Without a folder the first use counts them. The driver runs a Spark job, unless it has collected the rows. Ranks
        receive the driver's count, if it has one. Otherwise this is a collective of all ranks, unless they have made a
        loader before."""
        return self._rows.count()

    def __len__(self) -> int:
        return self._rows.count()

    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int = 0,
        data_loader_fn: Callable[..., AbstractContextManager[object]] | None = None,
        **petastorm_reader_kwargs: object,
    ) -> AbstractContextManager[Any]:
        """Yield batches of tensors by column to a `with` block; further arguments are those of `make_batch_reader`.

        Epochs are endless by default. Name `cur_shard` and `shard_count` to have each row on one rank only."""
        # Only the process that trains needs torch; the driver, which converts, may have none.
        from farandole.torch.data import BatchedDataLoader

        make = data_loader_fn or BatchedDataLoader

        def load(stack: ExitStack) -> object:
            reader = stack.enter_context(self._read(num_epochs, workers_count, petastorm_reader_kwargs))
            loader = make(reader, batch_size=batch_size, shuffling_queue_capacity=shuffling_queue_capacity)
            return stack.enter_context(loader)

        return _Loading(load)

    def make_tf_dataset(
        self,
        batch_size: int | None = None,
        prefetch: int | None = None,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int | None = None,
        **petastorm_reader_kwargs: object,
    ) -> AbstractContextManager[Any]:
        """Yield a `tf.data.Dataset` of named tuples of `batch_size` rows, by default 32, to a `with` block.

        The other arguments are those of `make_torch_dataloader`. The reader already shuffles rows and reads ahead;
        `shuffling_queue_capacity` adds a buffer of so many rows, `prefetch` one of so many batches."""
        # Imported here, as torch's loader above.
        from farandole.tensorflow.data import make_batched_dataset, split_into_rows

        def load(stack: ExitStack) -> object:
            reader = stack.enter_context(self._read(num_epochs, workers_count, petastorm_reader_kwargs))
            rows = 32 if batch_size is None else batch_size
            if shuffling_queue_capacity:
                mixed = split_into_rows(make_batched_dataset(reader, None))
                dataset = mixed.shuffle(shuffling_queue_capacity).batch(rows)
            else:
                dataset = make_batched_dataset(reader, rows)
            return dataset if prefetch is None else dataset.prefetch(prefetch)

        return _Loading(load)

    def delete(self) -> None:
        """Remove the files; the rows cannot be read afterwards. Idempotent."""
        self._rows.close()

    def _read(self, num_epochs: int | None, workers_count: int | None, options: ReaderArguments) -> "data.Reader":
        workers = {} if workers_count is None else {"workers_count": workers_count}
        return self._rows.read({"num_epochs": num_epochs, **workers, **options})


class GivenRows:
    """The rows that a job feeds to this rank. The call is unpickled before they arrive, and runs afterwards."""

    url = None

    def __init__(self, fed: FedRows, rows: int | None) -> None:
        self._fed, self._rows = fed, rows

    def files(self) -> list[str]:
        """See `ConvertedRows`."""
        return []

    def count(self) -> int:
        """Return the number of rows of all ranks; a collective, unless the number is known."""
        if self._rows is None:
            _, _, gather = _place()
            mine = sum(group.rows for group in self._source().row_groups)
            self._rows = mine if gather is None else sum(gather(mine))
        return self._rows

    def read(self, options: ReaderArguments) -> "data.Reader":
        """Read this rank's rows; raises `NotInitializedError` before `init()`."""
        rank, size, gather = _place()
        reader = read_own(self._source(), options, rank, size, gather)
        self.count()  # while all ranks take part; later, one may ask alone
        return reader

    def close(self) -> None:
        """Do nothing: the rows go with the rank."""

    def _source(self) -> "data.ShardSource":
        if self._fed.paths:
            return open_rows(path_of_collected(self._fed))
        here = current_rank()
        if here is None:
            raise ConfigError("converter", "its rows are those of a rank's own process; make loaders there")
        return open_rows(here.path_of(self._fed))


def read_own(
    source: "data.ShardSource", options: ReaderArguments, rank: int, size: int, gather: "data.Gather | None"
) -> "data.Reader":
    """Read rows that only this rank of `size` has; raises `ConfigError` when another shard is asked for."""
    shard, shards = options.get("cur_shard"), options.get("shard_count")
    if (shard, shards) != (rank, size) and not (shard is shards is None and size == 1):
        raise ConfigError(
            "cur_shard",
            f"is {shard} of shard_count={shards}, but rank {rank} of {size} has no rows but its own; give hvd.rank() "
            f"and hvd.size(), or name a folder that all share in Spark's setting {CACHE_SETTINGS[0]} before the "
            "converter is made",
        )
    return data.make_feed_reader(source, gather=gather, **options)


def _place() -> "tuple[int, int, data.Gather | None]":
    """Return rank, number of ranks and, for several, their all-gather; raises `NotInitializedError` before `init()`."""
    job = JobEnvironment.read(os.environ)
    if not is_initialized() and (job is None or job.size == 1):
        return 0, 1, None
    here = context()
    return here.rank, here.size, allgather_object if here.size > 1 else None
