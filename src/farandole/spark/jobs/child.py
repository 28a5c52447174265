"""The rank's own process below its barrier task: access to the task's channel and to the rank's rows."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from farandole.launch.channel import Orders, WorkerEnd
from farandole.spark.rows.fed_rows import FedRows, give_rows

RUNNER = "farandole.spark.jobs.child:run_rank"


class RankSide:
    """Access of a rank's user code to its barrier task: the channel, and the files with the rank's rows."""

    def __init__(self, channel: WorkerEnd, shard_fds: Sequence[int]) -> None:
        self.channel = channel
        self._shard_fds = shard_fds

    @property
    def shard(self) -> Path | None:
        """The path of a file with this rank's rows of the first DataFrame; None without one."""
        return self._path(0) if self._shard_fds else None

    def path_of(self, rows: FedRows) -> str:
        """Return the path of the file with this rank's rows of the DataFrame that `rows` stands for."""
        return str(self._path(rows.number))

    def _path(self, number: int) -> Path:
        # The file has no name. The path has the process id, not "self", so that a data loader's workers find it, too.
        return Path(f"/proc/{os.getpid()}/fd/{self._shard_fds[number]}")


# State outside `core`, on purpose: user code reaches its task through functions without a handle (log_to_driver,
# shard), and this process runs one rank and ends with it.
_current: RankSide | None = None


def current_rank() -> RankSide | None:
    """Return the rank that this process runs for a Spark task; None in every other process."""
    return _current


def shard() -> Path | None:
    """Return the path of the Arrow IPC file with this rank's rows of the job's DataFrame; None without one.

    Helper processes can open and map the file, too, as long as the rank's own process lives."""
    return _current.shard if _current is not None else None


def available_devices() -> list[str]:
    """Return the index of this rank's own GPU among the visible ones, in a list; an empty list without GPUs."""
    gpus, place = os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.environ.get("FARANDOLE_LOCAL_RANK")
    return [place] if gpus not in ("", "-1") and place is not None else []


@contextmanager
def _as_current(rank: RankSide) -> Iterator[None]:
    global _current
    _current = rank
    try:
        yield
    finally:
        _current = None


def run_rank(
    channel: WorkerEnd,
    orders: Orders,
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> object:
    """Call `function` with the rank's rows in place of DataFrames; a `worker.Runner`."""
    side = RankSide(channel, orders.fds)
    with _as_current(side):
        given, named = give_rows(args, kwargs, side.path_of)
        return function(*given, **named)
