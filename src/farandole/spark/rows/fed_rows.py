"""DataFrames in a call, on a rank: their placeholders, and the rows that replace them.

Imports nothing that a rank without DataFrames does not need."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from farandole import data
from farandole.launch.channel import Orders, WorkerEnd
from farandole.topology import JobEnvironment

COLLECTED = "farandole.spark.rows.fed_rows:run_collected"


@dataclass(frozen=True, slots=True)
class FedRows:
    """Placeholder of the job's `number`-th DataFrame in the pickled call.

    For local ranks `paths` has the file of each rank."""

    number: int
    paths: tuple[str, ...] = ()


def give_rows(
    args: Sequence[object], kwargs: Mapping[str, object], path_of: Callable[[FedRows], str]
) -> tuple[list[object], dict[str, object]]:
    """Replace each placeholder among the arguments by this rank's rows, in the file that `path_of` returns for it."""

    def given(value: object) -> object:
        return open_rows(path_of(value)) if isinstance(value, FedRows) else value

    return [given(value) for value in args], {name: given(value) for name, value in kwargs.items()}


def open_rows(path: str) -> "data.ShardSource":
    """Open a rank's file of rows."""
    return data.ShardSource(path)


def path_of_collected(rows: FedRows) -> str:
    """Return this rank's file of `dataframes.collected`."""
    job = JobEnvironment.read(os.environ)
    return rows.paths[0 if job is None else job.rank]


def run_collected(
    channel: WorkerEnd,
    orders: Orders,
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> object:
    """Call `function` with this rank's rows of `dataframes.collected` in place of DataFrames; a `worker.Runner`."""
    given, named = give_rows(args, kwargs, path_of_collected)
    return function(*given, **named)
