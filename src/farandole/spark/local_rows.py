"""Rows that an estimator gets without Spark: a pandas DataFrame, an Arrow table, or Parquet files."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import ParquetSource
from farandole.errors import DataError
from farandole.spark.disks import local_directory

__all__ = ["as_files", "as_frame", "feature_batches", "is_local"]

GROUP = 1 << 16  # rows of a row group; ranks read those of their share
BATCH = 10_000  # rows that a model predicts at once, as in Spark


def is_local(dataset: object) -> bool:
    """Return whether `dataset` holds rows that need no Spark."""
    return isinstance(dataset, (str, os.PathLike, pd.DataFrame, pa.Table))


@contextmanager
def as_files(dataset: Any) -> Iterator[str]:
    """Yield the URL or path of Parquet files with the rows; those that are written for it are removed at the end.

    Raises `DataError` for a pandas column that Arrow cannot hold."""
    if isinstance(dataset, (str, os.PathLike)):
        yield os.fspath(dataset)
        return
    table = dataset if isinstance(dataset, pa.Table) else _as_table(dataset)
    with tempfile.TemporaryDirectory(prefix="farandole-rows-", dir=local_directory(os.environ, 0)) as folder:
        pq.write_table(table, os.path.join(folder, "rows.parquet"), row_group_size=GROUP)
        yield folder


def as_frame(dataset: Any) -> pd.DataFrame:
    """Return the rows as a pandas DataFrame, with arrays in place of lists; reads the files of a path or URL."""
    if isinstance(dataset, (str, os.PathLike)):
        source = ParquetSource(os.fspath(dataset), {})
        tables = [source.read(group, source.schema.names) for group in source.row_groups]
        table = pa.concat_tables([source.schema.empty_table(), *tables])
        return table.to_pandas()
    table = dataset if isinstance(dataset, pa.Table) else _as_table(dataset)
    frame: pd.DataFrame = table.to_pandas()
    return frame if isinstance(dataset, pa.Table) else frame.set_axis(dataset.index, axis="index")


def feature_batches(frame: pd.DataFrame, names: Sequence[str]) -> Iterator[tuple[pd.Series, ...]]:
    """Yield the columns of a model's features, batch by batch; raises `DataError` for a column that is not there."""
    for name in names:
        if name not in frame.columns:
            raise DataError(name, f"is not among the columns, which are {', '.join(map(str, frame.columns))}")
    columns = [frame[name].astype("int8") if frame[name].dtype == bool else frame[name] for name in names]
    for first in range(0, len(frame), BATCH):
        yield tuple(column.iloc[first : first + BATCH].reset_index(drop=True) for column in columns)


def _as_table(frame: pd.DataFrame) -> pa.Table:
    named = {str(name): frame[name] for name in frame.columns}
    columns = {}
    for name, column in named.items():
        try:
            columns[name] = pa.array(column, from_pandas=True)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(name, f"Arrow cannot hold it: {error}") from error
    return pa.table(columns)
