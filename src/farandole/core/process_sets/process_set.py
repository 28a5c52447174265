"""Process sets, as users pass them to operations: all ranks of the job, or some of them."""

from collections.abc import Iterable, Sequence
from operator import index
from typing import SupportsIndex

from farandole.core import default
from farandole.core.process_sets.agreement import Sets
from farandole.core.process_sets.membership import Membership
from farandole.core.process_sets.registry import Ranks
from farandole.errors import InvalidRequest
from farandole.meeting.launched.communicators import Communicator, is_communicator, own_place, places_of

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "is_alone",
    "membership_of",
    "remove_process_set",
    "require_registered",
]


class ProcessSet:
    """Some of the job's ranks; `add_process_set` or `init(process_sets=...)` registers the set on all ranks.

    Before that, and after its removal, `process_set_id` is None."""

    def __init__(self, ranks_or_comm: Iterable[SupportsIndex] | Communicator) -> None:
        self._comm = ranks_or_comm if is_communicator(ranks_or_comm) else None
        if is_communicator(ranks_or_comm):
            self._ranks: list[int] | None = None  # known once the set is registered
            return
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(f"ProcessSet needs a list of ranks (integers), got {type(ranks_or_comm).__name__}")
        ranks = list(ranks_or_comm)
        if not all(isinstance(rank, SupportsIndex) and not isinstance(rank, bool) for rank in ranks):
            raise ValueError(f"ProcessSet needs a list of ranks (integers), got {ranks!r}")
        self._ranks = sorted(map(index, ranks))  # of integers of NumPy too

    def __setattr__(self, name: str, value: object) -> None:
        if name == "process_set_id":
            raise ValueError("a process set has the number that add_process_set or init(process_sets=...) gives it")
        super().__setattr__(name, value)

    # The caller's context holds the state of the set, because ranks that are threads may share one object.

    @property
    def process_set_id(self) -> int | None:
        return default.context().sets.number_of(self) if default.is_initialized() else None

    @property
    def ranks(self) -> list[int] | None:
        """The ranks of the set. An elastic job may have lost some of those that it was made with."""
        ranks = self._registered() or self._ranks
        return None if ranks is None else list(ranks)

    @property
    def mpi_comm(self) -> Communicator | None:
        """The communicator of mpi4py that the set was made of, if it was."""
        return self._comm

    def add_to(self, sets: Sets) -> None:
        """Register the set with those of a job; all ranks must call it. See `add_process_set`."""
        if self._comm is None:
            sets.add(self, self._ranks or ())
        else:
            self._ranks = sets.add_parts(self, own_place(), places_of(self._comm))

    def size(self) -> int | None:
        """Return the number of ranks of the set; None if it is not registered."""
        ranks = self._registered()
        return None if ranks is None else len(ranks)

    def rank(self) -> int | None:
        """Return this process' rank in the set; None if the set is not registered.

        Raises `ValueError` if this process is not a member."""
        ranks = self._registered()
        if ranks is None:
            return None
        if default.rank() not in ranks:
            raise ValueError("Process is not part of provided process set.")
        return ranks.index(default.rank())

    def included(self) -> bool | None:
        """Return whether this process is a member; None if the set is not registered."""
        ranks = self._registered()
        return None if ranks is None else default.rank() in ranks

    def _registered(self) -> Ranks | None:
        return default.context().sets.ranks_of(self) if default.is_initialized() else None

    # The object identifies the set, so copies of its holder, such as an optimizer, must hold the same object.

    def __copy__(self) -> "ProcessSet":
        return self

    def __deepcopy__(self, memo: object) -> "ProcessSet":
        return self

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class GlobalProcessSet(ProcessSet):
    """All ranks of the caller's job; `ranks` is None before `init()`."""

    def __init__(self) -> None:
        super().__init__([])

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def ranks(self) -> list[int] | None:
        return list(range(default.size())) if default.is_initialized() else None

    def size(self) -> int | None:
        """Return the number of ranks of the job; None before `init()`."""
        return default.size() if default.is_initialized() else None

    def rank(self) -> int | None:
        """Return this process' rank; None before `init()`."""
        return default.rank() if default.is_initialized() else None

    def included(self) -> bool | None:
        """Return True, or None before `init()`."""
        return True if default.is_initialized() else None

    def __reduce__(self) -> str:
        return "global_process_set"  # unpickled as the object of that process


global_process_set = GlobalProcessSet()


def add_process_set(process_set: ProcessSet | Iterable[int] | Communicator) -> ProcessSet:
    """Make and return a set of some of the job's ranks; all ranks of the job must call it, members or not.

    Blocks until all ranks have called. Operations in flight go on. Raises, on all ranks, `ValueError` for a duplicate
    set, duplicate ranks or ranks that the job does not have, `MismatchError` if ranks give different sets, and
    `RendezvousError` if the members cannot connect. No set is made then. Ranks may give different communicators of
    mpi4py, as after a split; each of them becomes a set."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    added.add_to(default.context().sets)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set; all ranks of the job must call it, members or not. The set can be added again.

    Returns False, without blocking, for the global set and for a set that is not registered. Blocks until all ranks
    have called. Operations that all members had requested before complete; others raise `EngineClosed`. Raises
    `MismatchError` on all ranks if they give different sets; the set then stays."""
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"expected a ProcessSet, got {type(process_set).__name__}")
    return default.context().sets.remove(process_set)


def process_set_of(ranks: Sequence[int]) -> ProcessSet:
    """Return the registered set that was made with `ranks`, else a new one, which is not registered."""
    made = default.context().sets.made if default.is_initialized() else {}
    registered = (key for key, (_, asked) in made.items() if isinstance(key, ProcessSet) and list(asked) == list(ranks))
    return next(registered, None) or ProcessSet(ranks)


def membership_of(process_set: ProcessSet, kind: str, name: str | None = None) -> Membership:
    """Return the caller's membership in a set, for an operation; raises `InvalidRequest` without one."""
    here = default.shared or default.membership()
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


def is_alone(process_set: ProcessSet) -> bool:
    """Return whether this rank reduces with no other one. An elastic job of one rank may grow, so it does not count."""
    return not process_set.included() or (process_set.size() == 1 and not default.is_elastic())


def require_registered(process_set: ProcessSet, what: str) -> None:
    """Raise `InvalidRequest` if `process_set` is not registered; `what` is the name of the request."""
    if not isinstance(process_set, ProcessSet):
        raise InvalidRequest(what, f"process_set should be a ProcessSet, got {type(process_set).__name__}")
    if isinstance(process_set, GlobalProcessSet):
        default.rank()  # raises before `init()`; a newcomer need not take its place to make an optimizer
        return
    default.membership()
    if process_set.process_set_id is None:
        raise InvalidRequest(
            what,
            f"{process_set!r} is not registered; every rank has to call add_process_set first, or pass it to "
            "init(process_sets=[...])",
        )
