"""Parquet files as the source of an estimator's rows, planned on the driver from the files' footers."""

from collections.abc import Mapping, Sequence
from typing import Self

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import DataType, StringType, StructField, StructType

from farandole.data import ParquetSource
from farandole.data.formats.fields import is_vector
from farandole.errors import ConfigError, DataError
from farandole.estimators.feed import Feed
from farandole.estimators.store import FilesystemStore
from farandole.estimators.trainers.parquet_rows import ParquetFolder, ParquetRows

_VALIDATION_FOLDER = "intermediate_val_data"


class StoredRows:
    """The rows of the Parquet files under the URL `train`, and the rows for validation under `held`, if it is given.

    With `by_content` each rank gets the same rows as from a DataFrame, otherwise consecutive row groups. Raises
    `SourceError` for files that cannot be read."""

    def __init__(
        self, train: str, held: str | None, options: Mapping[str, object], *, by_content: bool = False
    ) -> None:
        self._train, self._held, self._options, self.by_content = train, held, options, by_content
        self._source = ParquetSource(train, options)
        self._schema: pa.Schema = self._source.schema

    @classmethod
    def of_store(cls, store: FilesystemStore, dataset_idx: int | None) -> Self:
        """Return the rows in the folders of a store; raises `ConfigError` without rows to train on."""
        train, held = store.get_train_data_path(dataset_idx), store.get_val_data_path(dataset_idx)
        if not store.exists(train):
            raise ConfigError("store", f"has no rows to train on: {train} does not exist")
        return cls(store.url(train), store.url(held) if store.exists(held) else None, store.storage_options)

    def schema(self, needed: Sequence[str]) -> StructType:
        """Return the columns with Spark's types; raises `DataError` for a `needed` column whose type Spark lacks."""
        return StructType([StructField(each.name, _type(each, each.name in needed)) for each in self._schema])

    def validation(self, asked: float | str | None) -> float | str | None:
        """Return the column or fraction that chooses the rows for validation; None if they have files of their own."""
        return asked if self._held is None else None

    def planned(self, feed: Feed) -> ParquetRows:
        """Return the files and columns that ranks read.

        Raises `DataError` if the files for validation lack a column or have it in another type."""
        held = None
        if self._held is not None:
            source = ParquetSource(self._held, self._options)
            for name in feed.columns:
                kinds = [
                    each.field(name).type if name in each.names else None for each in (self._schema, source.schema)
                ]
                if kinds[0] != kinds[1]:
                    raise DataError(name, f"is {kinds[0]} in the rows to train on, {kinds[1]} in {_VALIDATION_FOLDER}")
            held = ParquetFolder.of(self._held, source)
        return ParquetRows(
            train=ParquetFolder.of(self._train, self._source),
            held=held,
            storage_options=self._options,
            columns=feed.columns,
            as_they_are=feed.as_they_are,
            validation_col=feed.validation_col,
            by_content=self.by_content,
        )

    def validation_name(self, feed: Feed) -> str | None:
        """Return the column or folder with the rows for validation, for errors; None without one."""
        return feed.validation_col if self._held is None else _VALIDATION_FOLDER


def _type(field: pa.Field, needed: bool) -> DataType:
    if is_vector(field.type):
        return VectorUDT()
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    try:
        return from_arrow_type(kind)
    except PySparkException as error:
        if needed:
            raise DataError(field.name, f"Spark has no type for {kind}; write it in another one") from error
        return StringType()
