"""Membership of a rank in a process set."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from farandole._native import Engine
from farandole.errors import InvalidRequest, spell_ranks


class Counters:
    """Counters of the operations without a name, by kind.

    `next` of one is atomic under the GIL, so no two threads get the same number."""

    def __init__(self) -> None:
        self.of: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class Membership:
    """This rank's membership in a process set: the set's engine, and the rank's number in it.

    The engine numbers its ranks from 0. They are `members` of the job in this order, or all ranks without `members`.
    A rank's memberships in one set of one job share their `counters`.
    """

    __slots__ = ("_places", "counters", "engine", "rank", "size")

    def __init__(
        self, engine: Engine, rank: int, size: int, counters: Counters, members: Sequence[int] | None = None
    ) -> None:
        self.engine, self.rank, self.size, self.counters = engine, rank, size, counters
        self._places = None if members is None else {member: place for place, member in enumerate(members)}

    def wire_name(self, kind: str, name: str | None) -> str:
        """Return the name on the wire: `<kind>.<name>`, or `<kind>.noname.<n>` for the nth operation without a name."""
        return f"{kind}.{name}" if name is not None else f"{kind}.noname.{next(self.counters.of[kind])}"

    def place_of(self, rank: int, wire: str) -> int:
        """Return the engine's number of the job's rank `rank`; raises `InvalidRequest` if it is not a member."""
        if self._places is None:
            return rank  # the engine checks the range
        if rank not in self._places:
            raise InvalidRequest(
                wire,
                f"received invalid root rank {rank}: the members of its process set are {spell_ranks(self._places)}",
            )
        return self._places[rank]
