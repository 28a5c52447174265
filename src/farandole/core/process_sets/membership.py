"""Membership of a rank in a process set: everything that an operation needs to know of its ranks."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from farandole._native import Engine
from farandole.errors import InvalidRequest, spell_ranks

__all__ = ["Counters", "Membership"]


class Counters:
    """Counts operations without a name, by kind."""

    def __init__(self) -> None:
        self._next: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

    def next(self, kind: str) -> int:
        # next() on itertools.count is one step under the GIL, so two threads never get one number.
        return next(self._next[kind])


class Membership:
    """This rank's place in an engine, and what the functions of this package need of it at every call.

    The engine numbers its ranks from 0. With `members` those are some of the job's ranks, in this order; without, all.
    """

    __slots__ = ("_counters", "_places", "engine", "rank", "size")

    def __init__(
        self, engine: Engine, rank: int, size: int, counters: Counters, members: Sequence[int] | None = None
    ) -> None:
        self.engine, self.rank, self.size, self._counters = engine, rank, size, counters
        self._places = None if members is None else {member: place for place, member in enumerate(members)}

    def wire_name(self, kind: str, name: str | None) -> str:
        """Return the name ranks agree on: `<kind>.<name>`, or `<kind>.noname.<n>` for the nth one without a name."""
        return f"{kind}.{name}" if name is not None else f"{kind}.noname.{self._counters.next(kind)}"

    def place_of(self, rank: int, wire: str) -> int:
        """Return the engine's number for the job's rank `rank`; raises `InvalidRequest` when it takes no part."""
        if self._places is None:
            return rank  # the engine knows its own limits
        if rank not in self._places:
            raise InvalidRequest(
                wire,
                f"received invalid root rank {rank}: the members of its process set are {spell_ranks(self._places)}",
            )
        return self._places[rank]
