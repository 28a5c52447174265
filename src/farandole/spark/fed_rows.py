"""A DataFrame among the arguments of a call: it stays with Spark, and each rank gets its share of the rows instead."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_type

from farandole.errors import ConfigError, DataError
from farandole.spark.spill import local_directory, spill
from farandole.topology import JobEnvironment

if TYPE_CHECKING:
    from farandole.data import ShardSource

__all__ = ["FedRows", "arrow_schema", "collected", "give_rows", "path_of_collected", "take_dataframe"]


@dataclass(frozen=True, slots=True)
class FedRows:
    """Stands for the DataFrame while the call is pickled; on the ranks of one machine, `paths` has each one's file."""

    paths: tuple[str, ...] = ()


def take_dataframe(
    args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[list[object], dict[str, object], DataFrame | None]:
    """Take the DataFrame out of the arguments and put `FedRows` in its place.

    Raises `ConfigError` for two of them: a job has one input."""
    found = [value for value in [*args, *kwargs.values()] if isinstance(value, DataFrame)]
    if len(found) > 1:
        raise ConfigError(
            "dataframe",
            f"{len(found)} are among the arguments, and a job feeds one; unite them, with a column that tells rows "
            "apart, and choose with farandole.data.SelectedSource",
        )
    placed = [FedRows() if isinstance(value, DataFrame) else value for value in args]
    named = {name: FedRows() if isinstance(value, DataFrame) else value for name, value in kwargs.items()}
    return placed, named, found[0] if found else None


def give_rows(
    args: Sequence[Any], kwargs: Mapping[str, Any], path_of: Callable[[FedRows], str]
) -> tuple[list[Any], dict[str, Any]]:
    """Put this rank's rows, in the file that `path_of` names, where the DataFrame was."""

    def given(value: Any) -> Any:
        return open_rows(path_of(value)) if isinstance(value, FedRows) else value

    return [given(value) for value in args], {name: given(value) for name, value in kwargs.items()}


def open_rows(path: str) -> "ShardSource":
    """Open a rank's file."""
    # Here, as most jobs have no DataFrame, and their ranks start sooner without it.
    from farandole.data import ShardSource

    return ShardSource(path)


def arrow_schema(dataframe: DataFrame) -> pa.Schema:
    """Return the columns as ranks get them; raises `DataError` naming one that Spark cannot hand over."""
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
def collected(dataframe: DataFrame, num_proc: int) -> Iterator[FedRows]:
    """Bring all rows to this process and lay them out for `num_proc` ranks of this machine, in files without names.

    For a try before a job of Spark's: all rows are in this process's memory for a moment."""
    arrow_schema(dataframe)  # names what cannot be collected, either
    table = dataframe.toArrow()
    with ExitStack() as stack:
        paths = []
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
        yield FedRows(tuple(paths))


def path_of_collected(rows: FedRows) -> str:
    """Return this rank's file of `collected`."""
    job = JobEnvironment.read(os.environ)
    return rows.paths[0 if job is None else job.rank]
