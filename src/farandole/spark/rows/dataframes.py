"""DataFrames in a call, on the driver: they stay in Spark, the call has placeholders, and ranks get shares of rows."""

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_type

from farandole.errors import DataError
from farandole.spark.rows.column_names import check_names
from farandole.spark.rows.disks import local_directory
from farandole.spark.rows.fed_rows import FedRows
from farandole.spark.rows.spill import spill

_STREAM = (
    "a streaming DataFrame cannot be fed to ranks, because a repeated batch would bring its rows twice; write it with "
    "df.writeStream.format('parquet')...start(folder), and let each rank read the folder meanwhile with "
    "GrowingLoader(Growing(folder, format='stream'), ...)"
)

# Set while a job's call is pickled: gives the DataFrame of an object in the call its number among the job's. The object
# has no other way to it, as pickle passes it no argument.
_numbering: ContextVar[Callable[[DataFrame], FedRows]] = ContextVar("farandole_numbering")


def take_dataframes(
    args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[list[object], dict[str, object], list[DataFrame]]:
    """Replace each DataFrame among the arguments by a `FedRows`; return the arguments and the DataFrames."""
    found: list[DataFrame] = []

    def replaced(value: object) -> object:
        return FedRows(_number(value, found)) if isinstance(value, DataFrame) else value

    placed, named = [replaced(value) for value in args], {name: replaced(value) for name, value in kwargs.items()}
    return placed, named, found


@contextmanager
def feeding(dataframes: list[DataFrame], rows: Sequence[FedRows] = ()) -> Iterator[None]:
    """Let objects that are pickled in the block add their DataFrames to the job's `dataframes` once, by `stand_in`.

    `rows` has the placeholder of each DataFrame, if their rows are in files already."""

    def number(dataframe: DataFrame) -> FedRows:
        place = _number(dataframe, dataframes)
        return rows[place] if rows else FedRows(place)

    token = _numbering.set(number)
    try:
        yield
    finally:
        _numbering.reset(token)


def stand_in(dataframe: DataFrame) -> FedRows | None:
    """Return the placeholder of `dataframe` in the job's call that is being pickled; None outside of `feeding`."""
    number = _numbering.get(None)
    return None if number is None else number(dataframe)


def _number(dataframe: DataFrame, known: list[DataFrame]) -> int:
    """Return the index of `dataframe` in `known`, after appending it if it is new; equal queries are not compared."""
    for place, each in enumerate(known):
        if each is dataframe:
            return place
    known.append(dataframe)
    return len(known) - 1


def arrow_schema(dataframe: DataFrame) -> pa.Schema:
    """Return the schema of the rows that ranks get.

    Raises `DataError` naming a column that has no Arrow type, or the name of another column for Spark.
    Refuses streaming DataFrames: a repeated batch would bring rows twice, unless a committed log tells its attempts
    apart."""
    if dataframe.isStreaming:
        raise DataError("", _STREAM)
    check_names(dataframe, dataframe.columns)
    zone = dataframe.sparkSession.conf.get("spark.sql.session.timeZone")
    # Older versions of PySpark have no such argument and use UTC.
    known = inspect.signature(to_arrow_type).parameters
    convert = functools.partial(to_arrow_type, timezone=zone) if "timezone" in known else to_arrow_type
    fields = []
    for field in dataframe.schema.fields:
        try:
            fields.append(pa.field(field.name, convert(field.dataType), field.nullable))
        except PySparkException as error:
            kind = field.dataType.simpleString()
            raise DataError(field.name, f"Spark cannot convert {kind} to Arrow; cast it or leave it out") from error
    return pa.schema(fields)


@contextmanager
def collected(dataframes: Sequence[DataFrame], num_proc: int) -> Iterator[list[FedRows]]:
    """Collect all rows here, and write the shares of `num_proc` ranks of this machine to files without names.

    Yields the placeholder of each DataFrame, and closes the files at the end of the block. For tests on local ranks:
    all rows of a DataFrame are in this process's memory for a moment."""
    with ExitStack() as stack:
        found = []
        for number, dataframe in enumerate(dataframes):
            arrow_schema(dataframe)  # raises for a column that cannot be collected, either
            try:
                table, paths = dataframe.toArrow(), list[str]()
            except pa.ArrowInvalid as error:  # from PySpark, for vectors that are null among others
                problem = f"Arrow cannot hold the rows ({error}); fill or drop null vectors, if there are any"
                raise DataError("", problem) from error
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
