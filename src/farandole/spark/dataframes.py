"""The driver's side of a DataFrame among the arguments of a call: it stays with Spark, ranks get shares of its rows."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_type

from farandole.errors import DataError
from farandole.spark.disks import local_directory
from farandole.spark.fed_rows import FedRows
from farandole.spark.spill import spill

__all__ = ["arrow_schema", "collected", "feeding", "stand_in", "take_dataframes"]


_STREAM = (
    "a DataFrame of a stream is read through its sink, so that each row comes once: write it by "
    "df.writeStream.format('parquet')...start(folder), and let each rank read the folder meanwhile by "
    "GrowingLoader(Growing(folder, format='stream'), ...)"
)

# Set while a job's call is pickled: numbers the DataFrame of an object in it among the job's. No argument reaches such
# an object.
_numbering: ContextVar[Callable[[DataFrame], FedRows]] = ContextVar("farandole_numbering")


def take_dataframes(
    args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[list[object], dict[str, object], list[DataFrame]]:
    """Take the DataFrames out of the arguments and put a `FedRows` in the place of each."""
    found: list[DataFrame] = []

    def kept(value: object) -> object:
        return FedRows(_number(value, found)) if isinstance(value, DataFrame) else value

    placed, named = [kept(value) for value in args], {name: kept(value) for name, value in kwargs.items()}
    return placed, named, found


@contextmanager
def feeding(dataframes: list[DataFrame], rows: Sequence[FedRows] = ()) -> Iterator[None]:
    """Let what is pickled in the block add its DataFrames to the job's `dataframes`, each once, by `stand_in`.

    `rows` are what stands for them, if they have been laid out already."""

    def number(dataframe: DataFrame) -> FedRows:
        place = _number(dataframe, dataframes)
        return rows[place] if rows else FedRows(place)

    token = _numbering.set(number)
    try:
        yield
    finally:
        _numbering.reset(token)


def stand_in(dataframe: DataFrame) -> FedRows | None:
    """Return what stands for the rows of `dataframe` in the job's call that is being pickled; None outside of one."""
    number = _numbering.get(None)
    return None if number is None else number(dataframe)


def _number(dataframe: DataFrame, known: list[DataFrame]) -> int:
    """Return the place of `dataframe` among `known`, where it is put if it is new; equal queries are not compared."""
    for place, each in enumerate(known):
        if each is dataframe:
            return place
    known.append(dataframe)
    return len(known) - 1


def arrow_schema(dataframe: DataFrame) -> pa.Schema:
    """Return the columns as ranks get them; raises `DataError` naming one that Spark cannot hand over.

    Refuses DataFrames of streams: a repeated batch would bring rows twice, unless a committed log sets its attempts
    apart."""
    if dataframe.isStreaming:
        raise DataError("", _STREAM)
    zone = dataframe.sparkSession.conf.get("spark.sql.session.timeZone")
    # Older ones have no such argument and say UTC.
    options: Any = {"timezone": zone} if "timezone" in inspect.signature(to_arrow_type).parameters else {}
    fields = []
    for field in dataframe.schema.fields:
        try:
            fields.append(pa.field(field.name, to_arrow_type(field.dataType, **options), field.nullable))
        except PySparkException as error:
            kind = field.dataType.simpleString()
            raise DataError(field.name, f"Spark hands {kind} to no rank; cast it or leave it out") from error
    return pa.schema(fields)


@contextmanager
def collected(dataframes: Sequence[DataFrame], num_proc: int) -> Iterator[list[FedRows]]:
    """Bring all rows to this process and lay them out for `num_proc` ranks of this machine, in files without names.

    For a try before a job of Spark's: all rows of a DataFrame are in this process's memory for a moment."""
    with ExitStack() as stack:
        found = []
        for number, dataframe in enumerate(dataframes):
            arrow_schema(dataframe)  # names what cannot be collected, either
            table, paths = dataframe.toArrow(), []
            for rank in range(num_proc):
                first, last = (table.num_rows * place // num_proc for place in (rank, rank + 1))
                rows = spill(
                    table.slice(first, last - first).to_batches(),
                    table.schema,
                    local_directory(os.environ, rank),
                    stop=lambda: False,
                )
                stack.callback(rows.close)
                paths.append(f"/proc/{os.getpid()}/fd/{rows.file.fileno()}")
            found.append(FedRows(number, tuple(paths)))
        yield found
