"""Process sets as users name them in calls: all ranks of the job, or some that work as if they were a job."""

from collections.abc import Iterable

from farandole.core import default
from farandole.core.process_sets.membership import Membership
from farandole.errors import InvalidRequest

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "membership_of",
    "remove_process_set",
    "require_registered",
]


class ProcessSet:
    """Some of the job's ranks, once `add_process_set` or `init(process_sets=...)` has made the set known to all.

    Before that, and after its removal, `process_set_id` is None."""

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(f"ProcessSet needs a list of ranks (integers), got {type(ranks_or_comm).__name__}")
        ranks = list(ranks_or_comm)
        if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
            raise ValueError(f"ProcessSet needs a list of ranks (integers), got {ranks!r}")
        self._ranks = sorted(ranks)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "process_set_id":
            raise ValueError("a process set has the number that add_process_set or init(process_sets=...) gives it")
        super().__setattr__(name, value)

    # The context of the caller holds the state of the set, because ranks that are threads may share one object.

    @property
    def process_set_id(self) -> int | None:
        return default.context().sets.number_of(self) if default.is_initialized() else None

    @property
    def ranks(self) -> list[int] | None:
        return list(self._ranks)

    @property
    def mpi_comm(self) -> None:
        """Always None: a set is never made from an MPI communicator."""
        return None

    def size(self) -> int | None:
        """Return how many ranks the set has, None before the job knows it."""
        return None if self.process_set_id is None else len(self._ranks)

    def rank(self) -> int | None:
        """Return this process' place in the set, None before the job knows it.

        Raises `ValueError` when it is not a member."""
        if self.process_set_id is None:
            return None
        if default.rank() not in self._ranks:
            raise ValueError("Process is not part of provided process set.")
        return self._ranks.index(default.rank())

    def included(self) -> bool | None:
        """Return whether this process is a member, None before the job knows the set."""
        return None if self.process_set_id is None else default.rank() in self._ranks

    # The object's identity is the set's, also in a copy of what holds it, such as an optimizer.

    def __copy__(self) -> "ProcessSet":
        return self

    def __deepcopy__(self, memo: object) -> "ProcessSet":
        return self

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
        return list(range(default.size())) if default.is_initialized() else None

    def size(self) -> int | None:
        """Return how many ranks the job has, None before `init()`."""
        return default.size() if default.is_initialized() else None

    def rank(self) -> int | None:
        """Return this process' rank, None before `init()`."""
        return default.rank() if default.is_initialized() else None

    def included(self) -> bool | None:
        """Return True, or None before `init()`."""
        return True if default.is_initialized() else None

    def __reduce__(self) -> str:
        return "global_process_set"  # the one of the process that unpickles it


global_process_set = GlobalProcessSet()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a set of some of the job's ranks, and return it; all ranks of the job have to call, members or not.

    Blocks until they have. Operations pending elsewhere are not disturbed. Raises, on all ranks alike, `ValueError`
    for a set that is there already, for ranks named twice and for ranks that the job does not have, `MismatchError`
    when ranks ask for different sets, and `RendezvousError` when the members cannot connect. Then no set was made."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    default.context().sets.add(added, added.ranks or ())
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """End a set; all ranks of the job have to call, members or not. It may be added again.

    Returns False, at once, for the global set and for one that is not there. Blocks until all ranks have called;
    what all members had asked for before is done then, and what they had not raises `EngineClosed`. Raises
    `MismatchError` on all ranks when they ask for different things: the set stays."""
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"expected a ProcessSet, got {type(process_set).__name__}")
    return default.context().sets.remove(process_set)


def membership_of(process_set: ProcessSet, kind: str, name: str | None = None) -> Membership:
    """Return the caller's membership in a set, for an operation; raises `InvalidRequest` when it has none."""
    here = default.membership()
    if isinstance(process_set, GlobalProcessSet):
        return here
    wire = kind if name is None else f"{kind}.{name}"
    membership = default.context().sets.membership_of(process_set) if isinstance(process_set, ProcessSet) else None
    if membership is None:
        require_registered(process_set, wire)
        raise InvalidRequest(
            wire, f"Rank {default.rank()} is not a member of the provided process set, {process_set!r}"
        )
    return membership


def require_registered(process_set: ProcessSet, what: str) -> None:
    """Raise `InvalidRequest` for a set that the job does not know; `what` is being asked for."""
    if not isinstance(process_set, ProcessSet):
        raise InvalidRequest(what, f"process_set should be a ProcessSet, got {type(process_set).__name__}")
    default.membership()
    if process_set.process_set_id is None:
        raise InvalidRequest(
            what,
            f"{process_set!r} is not registered; every rank has to call add_process_set first, or pass it to "
            "init(process_sets=[...])",
        )
