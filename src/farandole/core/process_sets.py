"""Which ranks take part. There is one set so far: all of them."""

from collections.abc import Sequence

from farandole.core import default
from farandole.errors import ConfigError

__all__ = ["ProcessSet", "global_process_set"]


class ProcessSet:
    """Some of the job's ranks; unregistered (`process_set_id` is None) as long as no job knows it."""

    def __init__(self, ranks: Sequence[int]) -> None:
        if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
            raise ValueError(f"ProcessSet needs a list of ranks (integers), got {ranks!r}")
        self._ranks = sorted(ranks)

    @property
    def process_set_id(self) -> int | None:
        return None

    @property
    def ranks(self) -> list[int] | None:
        return list(self._ranks)

    @property
    def mpi_comm(self) -> None:
        """Always None: a set is never made from an MPI communicator."""
        return None

    def size(self) -> int | None:
        """Return how many ranks the set has, None before the job knows it."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process' place in the set; raises `ValueError` when it is not a member."""
        if self.process_set_id is None or self.ranks is None:
            return None
        if default.rank() not in self.ranks:
            raise ValueError("Process is not part of provided process set.")
        return self.ranks.index(default.rank())

    def included(self) -> bool | None:
        """Return whether this process is a member, None before the job knows the set."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return default.rank() in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class GlobalProcessSet(ProcessSet):
    """All ranks of the job that the caller is in; `ranks` is None before `init()`."""

    def __init__(self) -> None:
        super().__init__([])

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def ranks(self) -> list[int] | None:
        # Read from the caller's context each time: many ranks may share this object as threads.
        return list(range(default.size())) if default.is_initialized() else None


global_process_set = GlobalProcessSet()


def require_global(process_set: ProcessSet) -> None:
    """Raise `ConfigError` for any set but the global one."""
    if process_set is not global_process_set:
        raise ConfigError(
            "process_set",
            f"{process_set!r} is not available: process sets of your own come with add_process_set, which this "
            "version does not have; use global_process_set",
        )
