"""Rows that an estimator gets without Spark: a pandas DataFrame, an Arrow table, or Parquet files."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from farandole.data import ParquetSource
from farandole.data.formats.fields import is_vector
from farandole.data.formats.frames import frame_of
from farandole.data.formats.places import texts_of
from farandole.errors import ConfigError, DataError
from farandole.estimators.feed import HELD
from farandole.estimators.trainers.parquet_rows import fed_column
from farandole.spark.rows.disks import local_directory

GROUP = 1 << 16  # rows of a row group
BATCH = 10_000  # rows that a model predicts at once, as in Spark
_HOLDABLE = "make it numbers or arrays of numbers, a vector of pyspark.ml by its toArray()"
_SEVERAL = "is the name of several columns; give each its own"


def is_local(dataset: object) -> bool:
    """Return whether `dataset` has a type that is fitted without Spark."""
    return isinstance(dataset, (str, os.PathLike, pd.DataFrame, pa.Table))


@contextmanager
def as_files(dataset: object, needed: Sequence[str]) -> Iterator[str]:
    """Yield the URL or path of Parquet files with the rows; files that it writes are removed at the end.

    A file that it writes has the `needed` columns, or all columns if a needed one is missing. Raises `DataError` for a
    needed pandas column that Arrow cannot hold or whose name occurs twice, `ConfigError` for an empty path."""
    if isinstance(dataset, (str, os.PathLike)):
        yield _url(dataset)
        return
    table = dataset if isinstance(dataset, pa.Table) else _as_table(dataset, needed)
    if not table.num_rows:  # and perhaps no types
        raise DataError("", f"there are no rows in the {type(dataset).__name__}")
    if set(needed) <= set(table.column_names):
        table = table.select([*dict.fromkeys(needed)])
    with tempfile.TemporaryDirectory(prefix="farandole-rows-", dir=local_directory(os.environ, 0)) as folder:
        pq.write_table(table, os.path.join(folder, "rows.parquet"), row_group_size=GROUP)
        yield folder


def in_memory(dataset: Any) -> pd.DataFrame | pa.Table:
    """Return the rows in memory: a DataFrame or a table as it is, those of a path or URL as a table."""
    if not isinstance(dataset, (str, os.PathLike)):
        return dataset
    source = ParquetSource(_url(dataset), {})
    tables = [source.read(group, source.schema.names) for group in source.row_groups]
    return pa.concat_tables([source.schema.empty_table(), *tables])


def as_frame(dataset: Any) -> pd.DataFrame:
    """Return the rows as a pandas DataFrame. A DataFrame is returned as it is; files of a path or URL are read."""
    rows = in_memory(dataset)
    return rows if isinstance(rows, pd.DataFrame) else frame_of(rows)


def features_of(rows: pd.DataFrame | pa.Table, names: Sequence[str]) -> pd.DataFrame:
    """Return the columns of a model's features, with arrays in place of lists and vectors.

    Raises `DataError` for a column that is missing, occurs twice, holds nulls or other values than numbers, or that
    Arrow cannot hold. NaN is a null in pandas, and a number in Arrow and Parquet."""
    table = rows if isinstance(rows, pa.Table) else _as_table(rows, names)
    columns = {}
    for name in names:
        if name not in table.column_names:
            there = rows.column_names if isinstance(rows, pa.Table) else rows.columns
            raise DataError(name, f"is not among the columns, which are {', '.join(map(str, there))}")
        if table.column_names.count(name) > 1:
            raise DataError(name, _SEVERAL)
        _require_numbers(name, table.schema.field(name).type)
        columns[name] = fed_column(name, table[name])
        if nulls := _rows_with_nulls(columns[name]):
            raise DataError(name, f"{nulls} of {len(table)} rows are null or hold a null; fill or drop them first")
    features: pd.DataFrame = pa.table(columns).to_pandas()
    return features


def _require_numbers(name: str, kind: pa.DataType) -> None:
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    item = kind.value_type if lists or pa.types.is_dictionary(kind) else kind
    numbers = pa.types.is_integer(item) or pa.types.is_floating(item) or pa.types.is_boolean(item)
    if not numbers and not is_vector(kind):
        raise DataError(name, f"no tensor holds {kind}; {HELD}")


def _rows_with_nulls(column: pa.Array) -> int:
    nulls: int = column.null_count
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        holding = pc.list_parent_indices(column).filter(pc.is_null(pc.list_flatten(column)))
        nulls += len(holding.unique())
    return nulls


def feature_batches(features: pd.DataFrame, names: Sequence[str]) -> Iterator[tuple[pd.Series, ...]]:
    """Yield batches of at most `BATCH` rows: one Series per feature."""
    columns = [features[name] for name in names]
    for first in range(0, len(features), BATCH):
        yield tuple(column.iloc[first : first + BATCH].reset_index(drop=True) for column in columns)


def _url(path: "str | os.PathLike[str]") -> str:
    url = str(texts_of(path))
    if not url.strip():
        raise ConfigError("dataset", 'is an empty path; "." is the working folder')
    return url


def _as_table(frame: pd.DataFrame, needed: Sequence[str]) -> pa.Table:
    """Return the needed columns; if one is missing, all columns that Arrow can hold, so that an error can list them."""
    names = [str(name) for name in frame.columns]
    complete = set(needed) <= set(names)
    columns: dict[str, pa.Array] = {}
    for place, name in enumerate(names):
        if name in needed and name in columns:
            raise DataError(name, _SEVERAL)
        if name in columns or (complete and name not in needed):
            continue
        try:
            columns[name] = pa.array(frame.iloc[:, place], from_pandas=True)
        except (pa.ArrowException, OverflowError, UnicodeError) as error:  # integers, and texts, that no type holds
            if name in needed:
                raise DataError(name, f"Arrow cannot hold it: {error}; {_HOLDABLE}") from error
    return pa.table(columns)
