"""`make_spark_converter`, with Petastorm's arguments: a DataFrame as Parquet in a folder of its own, read by ranks."""

import logging
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import fsspec
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType

from farandole.data import make_batch_reader
from farandole.errors import ConfigError, DataError

__all__ = ["SparkDatasetConverter", "make_spark_converter"]

log = logging.getLogger(__name__)

# Where copies go, in Spark's configuration: our name, and the one that programs have.
CACHE_SETTINGS = ("farandole.spark.converter.parentCacheDirUrl", "petastorm.spark.converter.parentCacheDirUrl")


@dataclass(frozen=True)
class SparkDatasetConverter:
    """A copy of a DataFrame that ranks can read; can be pickled, into the function of a `HorovodRunner` for example.

    The copy goes with `delete`, or when the object that made it goes, at the latest with the driver's interpreter.
    """

    cache_dir_url: str
    dataset_size: int  # rows

    def __len__(self) -> int:
        return self.dataset_size

    @contextmanager
    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int = 0,
        data_loader_fn: Callable[..., Any] | None = None,
        **petastorm_reader_kwargs: Any,
    ) -> Iterator[Any]:
        """Give, in a `with` block, batches of tensors by column; the other arguments are those of `make_batch_reader`.

        Epochs are endless by default. Name `cur_shard` and `shard_count` to have each row on one rank only."""
        # Only the process that trains needs torch; the driver, which converts, may have none.
        from farandole.torch.data import BatchedDataLoader

        make = data_loader_fn or BatchedDataLoader
        options = dict(petastorm_reader_kwargs)
        if workers_count is not None:
            options["workers_count"] = workers_count
        with (
            make_batch_reader(self.cache_dir_url, None, num_epochs=num_epochs, **options) as reader,
            make(reader, batch_size=batch_size, shuffling_queue_capacity=shuffling_queue_capacity) as loader,
        ):
            yield loader

    @contextmanager
    def make_tf_dataset(
        self,
        batch_size: int | None = None,
        prefetch: int | None = None,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int | None = None,
        **petastorm_reader_kwargs: Any,
    ) -> Iterator[Any]:
        """Give, in a `with` block, a `tf.data.Dataset` of named tuples of `batch_size` rows, by default 32.

        The other arguments are those of `make_torch_dataloader`. Rows are shuffled and read ahead already:
        `shuffling_queue_capacity` and `prefetch` add to that only what they are given."""
        from farandole.tensorflow.data import make_batched_dataset

        options = dict(petastorm_reader_kwargs)
        if workers_count is not None:
            options["workers_count"] = workers_count
        with make_batch_reader(self.cache_dir_url, None, num_epochs=num_epochs, **options) as reader:
            rows = 32 if batch_size is None else batch_size
            if shuffling_queue_capacity:
                mixed = make_batched_dataset(reader, None).unbatch()
                dataset = mixed.shuffle(shuffling_queue_capacity).batch(rows)
            else:
                dataset = make_batched_dataset(reader, rows)
            yield dataset if prefetch is None else dataset.prefetch(prefetch)

    def delete(self) -> None:
        """Remove the copy; nothing can be read any more. Idempotent."""
        _remove(self.cache_dir_url)

    @classmethod
    def _owning(cls, url: str, rows: int) -> Self:
        made = cls(url, rows)
        # Copies of this object, on ranks, have no finalizer.
        weakref.finalize(made, _remove, url)
        return made


def make_spark_converter(
    df: DataFrame,
    parquet_row_group_size_bytes: int = 32 << 20,
    compression_codec: str | None = None,
    dtype: Literal["float32", "float64"] | None = None,
) -> SparkDatasetConverter:
    """Write `df` as Parquet, below the folder that Spark's setting farandole.spark.converter.parentCacheDirUrl names.

    Runs a Spark job and blocks until it is done. The folder must be the same for driver, executors and ranks. With
    `dtype` columns of floating point, arrays and vectors of them are cast; by default they stay as they are.
    Raises `ConfigError` without that setting or for a codec or type that is none, `DataError` for no rows.
    """
    spark = df.sparkSession
    parent = next((found for name in CACHE_SETTINGS if (found := spark.conf.get(name, None))), None)
    if parent is None:
        raise ConfigError(CACHE_SETTINGS[0], "is not set; name a folder that driver, executors and ranks share")
    if dtype not in (None, "float32", "float64"):
        raise ConfigError("dtype", f"must be float32, float64 or None, got {dtype!r}")
    codec = compression_codec or "uncompressed"
    if codec not in ("uncompressed", "bzip2", "gzip", "lz4", "snappy", "zstd"):
        raise ConfigError("compression_codec", f"Spark's Parquet knows no {codec!r}")
    url = f"{parent.rstrip('/')}/{uuid.uuid4().hex}"
    rows = df if dtype is None else df.select([_cast(df, name, dtype) for name in df.columns])
    writer = rows.write.option("compression", codec).option("parquet.block.size", parquet_row_group_size_bytes)
    try:
        writer.parquet(url)
        count = spark.read.parquet(url).count()
    except BaseException:
        _remove(url)
        raise
    if not count:
        _remove(url)
        raise DataError(", ".join(df.columns), "there are no rows")
    log.info("%d rows written to %s", count, url)
    return SparkDatasetConverter._owning(url, count)


def _cast(df: DataFrame, name: str, dtype: str) -> Any:
    column, kind = F.col("`" + name.replace("`", "``") + "`"), df.schema[name].dataType
    wanted = "float" if dtype == "float32" else "double"
    if isinstance(kind, VectorUDT):
        return vector_to_array(column, dtype).alias(name)
    if isinstance(kind, ArrayType) and _is_float(kind.elementType):
        return column.cast(f"array<{wanted}>").alias(name)
    return column.cast(wanted).alias(name) if _is_float(kind) else column


def _is_float(kind: DataType) -> bool:
    return isinstance(kind, (FloatType, DoubleType))


def _remove(url: str) -> None:
    fs, path = fsspec.core.url_to_fs(url)
    if fs.exists(path):
        fs.rm(path, recursive=True)
