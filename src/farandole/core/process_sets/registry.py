"""Registry of a job's process sets by number, equal on all ranks. Pure."""

from collections import deque
from collections.abc import Sequence

GLOBAL = 0  # the number of the set of all ranks

Ranks = tuple[int, ...]  # ascending, each once


class Registry:
    """The sets of a job of `size` ranks. Ranks that make the same calls in the same order have the same numbers.

    An elastic job may have other numbers of ranks later, up to `most`. So its sets may name ranks that it does not have
    yet, and all ranks that it has now."""

    def __init__(self, size: int, most: int | None = None) -> None:
        self._size, self._most = size, most
        self._sets: dict[int, Ranks] = {GLOBAL: tuple(range(size))}
        # By number, the ranks that each set was made with; also of sets that an elastic job has lost all ranks of.
        self._asked = dict(self._sets)
        self._freed: deque[int] = deque()

    @property
    def sets(self) -> dict[int, Ranks]:
        """The ranks of each set, by number."""
        return dict(self._sets)

    @property
    def next(self) -> int:
        """The number of the next set: the number that was freed first, or else a new one."""
        # Freed numbers are reused, so used and freed numbers together are 0, 1, 2, ... without gaps.
        return self._freed[0] if self._freed else len(self._asked)

    def check(self, ranks: Sequence[int]) -> Ranks:
        """Return `ranks` in ascending order; raises `ValueError` if they are not a set that can be added."""
        members = tuple(sorted(ranks))
        if not members:
            raise ValueError("a process set needs at least one rank")
        if len(set(members)) < len(members):
            raise ValueError(f"a process set holds each rank once, got {list(members)}")
        end = self._size if self._most is None else self._most
        strangers = [rank for rank in members if not 0 <= rank < end]
        if strangers:
            limit = "" if self._most is None else " at most (--max-np)"
            raise ValueError(f"the ranks of this job are 0 to {end - 1}{limit}, got {strangers} in a process set")
        # Two sets of an elastic job may have the same ranks left: [1], and what is left of [1, 3].
        number = next((number for number, known in self._asked.items() if known == members), None)
        if number is not None and not (self._most is not None and number == GLOBAL):
            raise ValueError(
                f"Attempted to add a duplicate process set: the ranks {list(members)} are process set {number} already"
            )
        return members

    def add(self, ranks: Sequence[int]) -> int:
        """Register a set and return its number; raises `ValueError` as `check` does."""
        members, number = self.check(ranks), self.next
        if self._freed:
            self._freed.popleft()
        self._asked[number] = members
        if held := self.held(members):
            self._sets[number] = held
        return number

    def held(self, asked: Ranks) -> Ranks:
        """Return those of the ranks `asked` that the job has now."""
        return tuple(rank for rank in asked if rank < self._size)

    def restore(self, number: int, asked: Ranks) -> Ranks:
        """Register a set of an elastic job's earlier generation under its number; return the ranks that it has now.

        Without any it keeps the number, but is not among `sets`."""
        members = self.held(asked)
        self._asked[number] = asked
        if members:
            self._sets[number] = members
        self._freed = deque(each for each in range(max(self._asked)) if each not in self._asked)
        return members

    def remove(self, number: int) -> bool:
        """Remove the set `number`; returns False for the set of all ranks and for a number without a set."""
        if number == GLOBAL or number not in self._sets:
            return False
        del self._sets[number], self._asked[number]
        self._freed.append(number)
        return True
