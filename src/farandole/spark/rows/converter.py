"""`make_spark_converter`, with Petastorm's arguments: loaders of a DataFrame, in a job's function or on the driver."""

import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

from farandole.extras import importing

with importing("farandole.spark.converter"):
    from pyspark.ml.functions import vector_to_array
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType


from farandole.data import Reader, ShardSource
from farandole.data.stores.urls import open_url
from farandole.errors import ConfigError, DataError
from farandole.masking import mask
from farandole.spark.rows.column_names import check_names
from farandole.spark.rows.dataframes import arrow_schema, collected, stand_in
from farandole.spark.rows.dataset_converter import (
    CACHE_SETTINGS,
    GivenRows,
    ReaderArguments,
    SparkDatasetConverter,
    read_own,
)
from farandole.spark.rows.fed_rows import open_rows
from farandole.spark.rows.written_rows import WrittenRows

__all__ = ["SparkDatasetConverter", "make_spark_converter"]

log = logging.getLogger(__name__)

ROW_GROUP_BYTES = 32 << 20
# Threads may make converters at once, and the setting that `_write` changes is their session's.
_WRITING = threading.Lock()


def make_spark_converter(
    df: DataFrame,
    parquet_row_group_size_bytes: int = ROW_GROUP_BYTES,
    compression_codec: str | None = None,
    dtype: Literal["float32", "float64"] | None = None,
) -> SparkDatasetConverter:
    """Return a converter, which makes loaders of `df` here and in functions of `HorovodRunner` and `run`.

    Returns at once; a job whose call contains the converter evaluates `df` and feeds the ranks. If Spark's setting
    farandole.spark.converter.parentCacheDirUrl names a folder, which driver, executors and ranks must share, `df` is
    written below it as Parquet instead: this runs a Spark job and blocks until it has ended.
    `parquet_row_group_size_bytes` and `compression_codec` apply only to these files. Timestamps are microseconds, as
    Spark's are. With `dtype` columns of floating point, and arrays and vectors of them, are cast; by default they are
    not. Raises `ConfigError` for an unknown codec or type, `SourceError` for a folder that cannot be opened,
    `DataError` for a column that has no Arrow type, for two columns of one name and for a DataFrame without rows;
    without a folder loaders raise the latter.
    """
    if dtype not in (None, "float32", "float64"):
        raise ConfigError("dtype", f"must be float32, float64 or None, got {dtype!r}")
    codec = compression_codec or "uncompressed"
    if codec not in ("uncompressed", "bzip2", "gzip", "lz4", "snappy", "zstd"):
        raise ConfigError("compression_codec", f"Spark's Parquet knows no {codec!r}")
    check_names(df, df.columns)
    conf = df.sparkSession.conf
    parent = next((found for name in CACHE_SETTINGS if (found := conf.get(name, None))), None)
    frame = df if dtype is None else df.select([_cast(df, name, dtype) for name in df.columns])
    if parent is not None:
        rows = _write(frame, f"{parent.rstrip('/')}/{uuid.uuid4().hex}", codec, parquet_row_group_size_bytes)
        return _owning(SparkDatasetConverter(rows), rows.close)
    if compression_codec is not None or parquet_row_group_size_bytes != ROW_GROUP_BYTES:
        log.warning("no Parquet is written: compression_codec and parquet_row_group_size_bytes are ignored")
    arrow_schema(frame)
    held = HeldRows(frame)
    return _owning(SparkDatasetConverter(held), held.close)


class HeldRows:
    """A DataFrame of this driver, whose rows jobs feed to ranks, and which loaders of this process collect."""

    url = None

    def __init__(self, dataframe: DataFrame) -> None:
        self._dataframe: DataFrame | None = dataframe
        self._rows: int | None = None
        self._source: ShardSource | None = None
        self._files = ExitStack()

    def __reduce__(self) -> tuple[Callable[..., GivenRows], tuple[object, ...]]:
        fed = stand_in(self._alive())
        if fed is None:
            raise ConfigError(
                "converter",
                "has no files that another process could read; hand it to HorovodRunner.run or farandole.spark.run, or "
                f"name a folder that all share in Spark's setting {CACHE_SETTINGS[0]} before it is made",
            )
        return GivenRows, (fed, self._rows)

    def files(self) -> list[str]:
        """See `ConvertedRows`."""
        return []

    def count(self) -> int:
        """Return the number of rows; a Spark job counts them once, unless they have been collected."""
        if self._rows is None:
            self._rows = self._alive().count()
        return self._rows

    def read(self, options: ReaderArguments) -> Reader:
        """Read all rows, which the first call collects."""
        frame = self._alive()
        if self._source is None:
            (fed,) = self._files.enter_context(collected([frame], 1))
            self._source = open_rows(fed.paths[0])
            self._rows = sum(group.rows for group in self._source.row_groups)
        return read_own(self._source, options, 0, 1, None)

    def close(self) -> None:
        """Release the DataFrame and its collected rows."""
        self._dataframe = self._source = None
        self._files.close()

    def _alive(self) -> DataFrame:
        if self._dataframe is None:
            raise ConfigError("converter", "was deleted; make another one")
        return self._dataframe


def _owning(converter: SparkDatasetConverter, close: Callable[[], None]) -> SparkDatasetConverter:
    # The copies of this object on ranks have no finalizer.
    weakref.finalize(converter, close)
    return converter


def _write(frame: DataFrame, url: str, codec: str, row_group_bytes: int) -> WrittenRows:
    """Write Parquet files; removes them if that fails, or if there are no rows, which raises `DataError`.

    Raises `SourceError`, before Spark writes anything, if this Python cannot open the URL."""
    open_url(url, {})
    writer = frame.write.option("compression", codec).option("parquet.block.size", row_group_bytes)
    try:
        with _WRITING, _set(frame.sparkSession, "spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS"):
            writer.parquet(url)
        count = frame.sparkSession.read.parquet(url).count()
        if not count:
            raise DataError("", "there are no rows")
    except BaseException:
        try:
            WrittenRows(url, 0).close()
        except Exception as error:
            log.warning("the failed copy at %s stays there (%s); remove it", mask(url), error)
        raise
    log.info("%d rows written to %s", count, mask(url))
    return WrittenRows(url, count)


@contextmanager
def _set(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Set a setting of the session, as writers have no option for it, and restore it afterwards."""
    before = spark.conf.get(name, None)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, before)


def _cast(df: DataFrame, name: str, dtype: str) -> Column:
    column, kind = F.col("`" + name.replace("`", "``") + "`"), df.schema[name].dataType
    wanted = "float" if dtype == "float32" else "double"
    if isinstance(kind, VectorUDT):
        return F.when(column.isNotNull(), vector_to_array(column, dtype)).alias(name)  # which fails on nulls
    if isinstance(kind, ArrayType) and _is_float(kind.elementType):
        return column.cast(f"array<{wanted}>").alias(name)
    return column.cast(wanted).alias(name) if _is_float(kind) else column


def _is_float(kind: DataType) -> bool:
    return isinstance(kind, (FloatType, DoubleType))
