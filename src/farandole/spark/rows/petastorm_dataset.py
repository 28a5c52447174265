"""Petastorm's context in which Spark writes a data set with a Unischema."""

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from farandole.data.formats.sources import ParquetSource
from farandole.data.unischema.schema import Unischema
from farandole.data.unischema.stored import FILE, read_schema, write_schema
from farandole.errors import ConfigError, SourceError

__all__ = ["get_schema_from_dataset_url", "materialize_dataset"]

_BLOCK = "parquet.block.size"  # a setting of Hadoop's, which each write takes from the session


@contextmanager
def materialize_dataset(
    spark: SparkSession,
    dataset_url: str,
    schema: Unischema,
    row_group_size_mb: int | None = None,
    use_summary_metadata: bool = False,
    filesystem_factory: None = None,
) -> Iterator[None]:
    """Write rows of `schema` as Parquet to the folder `dataset_url` in the `with` block; its end adds the schema.

    Row groups that Spark writes in the block have about `row_group_size_mb` MiB. Nothing is added if the block raises.
    `use_summary_metadata` has no effect: readers do not need the numbers of row groups."""
    if filesystem_factory is not None:
        raise ConfigError("filesystem_factory", "is not supported; name the file system in the URL")
    before = spark.conf.get(_BLOCK, None)
    if row_group_size_mb is not None:
        spark.conf.set(_BLOCK, str(row_group_size_mb << 20))
    try:
        yield
    finally:
        if row_group_size_mb is not None:
            spark.conf.unset(_BLOCK) if before is None else spark.conf.set(_BLOCK, before)
    write_schema(dataset_url, schema)


def get_schema_from_dataset_url(dataset_url_or_urls: str | list[str], **storage: object) -> Unischema:
    """Return the schema of a data set; raises `SourceError` for files without one.

    `storage` may hold `storage_options`; Petastorm's other arguments have no effect."""
    options = storage.get("storage_options") or {}
    assert isinstance(options, dict)
    content = ParquetSource(dataset_url_or_urls, options).beside(FILE)
    schema = None if content is None else read_schema(content, str(dataset_url_or_urls))
    if schema is None:
        raise SourceError(
            str(dataset_url_or_urls), f"has no Unischema: its {FILE} is missing, or was written by others"
        )
    return schema
