"""Registry of a job's process sets by number, equal on all ranks. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence

GLOBAL = 0  # the number of the set of all ranks

Ranks = tuple[int, ...]  # ascending, each once


class Registry:
    """The sets of a job of `size` ranks. Ranks that make the same calls in the same order have the same numbers."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._sets: dict[int, Ranks] = {GLOBAL: tuple(range(size))}
        self._freed: deque[int] = deque()

    @property
    def sets(self) -> dict[int, Ranks]:
        """The ranks of each set, by number."""
        return dict(self._sets)

    @property
    def next(self) -> int:
        """The number of the next set: the number that was freed first, or else a new one."""
        # Freed numbers are reused, so used and freed numbers together are 0, 1, 2, ... without gaps.
        return self._freed[0] if self._freed else len(self._sets)

    def check(self, ranks: Sequence[int]) -> Ranks:
        """Return `ranks` in ascending order; raises `ValueError` if they are not a set that can be added."""
        members = tuple(sorted(ranks))
        if not members:
            raise ValueError("a process set needs at least one rank")
        if len(set(members)) < len(members):
            raise ValueError(f"a process set holds each rank once, got {list(members)}")
        strangers = [rank for rank in members if not 0 <= rank < self._size]
        if strangers:
            raise ValueError(f"the ranks of this job are 0 to {self._size - 1}, got {strangers} in a process set")
        if members in self._sets.values():
            number = next(number for number, known in self._sets.items() if known == members)
            raise ValueError(
                f"Attempted to add a duplicate process set: the ranks {list(members)} are process set {number} already"
            )
        return members

    def add(self, ranks: Sequence[int]) -> int:
        """Register a set and return its number; raises `ValueError` as `check` does."""
        members, number = self.check(ranks), self.next
        if self._freed:
            self._freed.popleft()
        self._sets[number] = members
        return number

    def restore(self, sets: Mapping[int, Ranks]) -> None:
        """Register the sets of an earlier generation of the job under the numbers that they had."""
        self._sets |= sets
        self._freed = deque(number for number in range(max(self._sets)) if number not in self._sets)

    def remove(self, number: int) -> bool:
        """Remove the set `number`; returns False for the set of all ranks and for a number without a set."""
        if number == GLOBAL or number not in self._sets:
            return False
        del self._sets[number]
        self._freed.append(number)
        return True
