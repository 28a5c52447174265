"""The rank's own process, below its barrier task: what runs there before the user's function and beside it."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import cloudpickle

from farandole.spark.channel import RankEnd
from farandole.spark.fed_rows import FedRows, give_rows

__all__ = ["RankSide", "current_rank", "run_rank", "shard"]

Call: TypeAlias = tuple[Callable[..., object], tuple[object, ...], dict[str, object]]


class RankSide:
    """What user code of a rank can reach of its barrier task."""

    def __init__(self, rank: int, channel: RankEnd, shard_fds: Sequence[int]) -> None:
        self.rank = rank
        self.channel = channel
        self._shard_fds = shard_fds

    @property
    def shard(self) -> Path | None:
        """Where this rank's rows of the first DataFrame can be opened; None without one."""
        return self._path(0) if self._shard_fds else None

    def path_of(self, rows: FedRows) -> str:
        """Name the file with this rank's rows of the DataFrame that `rows` stands for."""
        return str(self._path(rows.number))

    def _path(self, number: int) -> Path:
        # The file has no name. The process's number, not "self", so that a data loader's workers find it as well.
        return Path(f"/proc/{os.getpid()}/fd/{self._shard_fds[number]}")


# State outside `core`, on purpose: user code reaches its task through functions without a handle (log_to_driver,
# shard), and this process runs one rank and ends with it.
_current: RankSide | None = None


def current_rank() -> RankSide | None:
    """The rank that this process runs for a Spark task; None in every other process."""
    return _current


def shard() -> Path | None:
    """The Arrow IPC file with this rank's rows of the job's DataFrame; None without one.

    It can be opened and mapped, by helper processes too, as long as the rank's own process lives."""
    return _current.shard if _current is not None else None


@contextmanager
def _as_current(rank: RankSide) -> Iterator[None]:
    global _current
    _current = rank
    try:
        yield
    finally:
        _current = None


def run_rank(rank: int, channel_name: str, pickled: bytes, keep: bool) -> object:
    """Run the pickled `(function, args, kwargs)` when the task lets this rank begin; drop the result unless `keep`.

    Unpickling imports what the function refers to, often a framework: that goes on while the tasks still meet."""
    channel = RankEnd(channel_name)
    try:
        call: Call = cloudpickle.loads(pickled)
        function, args, kwargs = call
        orders = channel.receive_orders()
        os.environ.update(orders.env)
        side = RankSide(rank, channel, orders.shard_fds)
        with _as_current(side):
            given, named = give_rows(args, kwargs, side.path_of)
            value = function(*given, **named)
    finally:
        channel.close()
    return value if keep else None
