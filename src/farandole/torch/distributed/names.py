"""Names for operations that torch matches by order alone."""

from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Protocol

from farandole.errors import FarandoleError

__all__ = ["NamedOperation", "Names", "Part", "SinglePart"]

PERIOD = 8  # the most operations of one call site that may be under way
LONGEST_RUN = 8
MOST_SITES = 1024


class Part(Protocol):
    """An operation under way, as the engine returns it."""

    def done(self) -> bool: ...

    def wait(self) -> object: ...


class SinglePart(Part, Protocol):
    """One operation, with its results once it has completed."""

    def result(self) -> object: ...

    def results(self) -> Sequence[object]: ...

    def received_splits(self) -> list[int]: ...

    def source(self) -> int: ...


class NamedOperation:
    """A name, and the operation that was last started under it."""

    __slots__ = ("name", "part")

    def __init__(self, name: str) -> None:
        self.name = name
        self.part: Part | None = None

    def free_name(self) -> str:
        """Return the name once nothing is under way under it; blocks until then."""
        part, self.part = self.part, None
        if part is not None and not part.done():
            with suppress(FarandoleError):  # its waiter gets the error
                part.wait()
        return self.name


class Names:
    """Names for the operations of a process group, equal on all ranks, which request them in one order.

    Counting would work, but a recurring name is agreed in a fraction of the time, and training repeats its steps. With
    names made of the request (kind, dtype, shape), ranks that differ in it would wait for each other until the timeout.
    So an operation is named after the *previous* one, on which the ranks agreed: differing ranks now meet under one
    name, and get an error."""

    def __init__(self) -> None:
        self._sites: dict[Hashable, _CallSite] = {}
        self._others = _CallSite("other")  # for a program that never repeats itself
        self._before: tuple[Hashable, int] = (None, 0)

    def next(self, signature: Hashable) -> NamedOperation:
        """Return the name of the next operation; `signature` must be equal on all ranks."""
        site = self._sites.get(self._before)
        if site is None:
            site = self._others
            if len(self._sites) < MOST_SITES:
                site = self._sites[self._before] = _CallSite(str(len(self._sites)))
        last, run = self._before
        self._before = (signature, min(run + 1, LONGEST_RUN) if signature == last else 1)
        return site.next()

    def start_over(self) -> None:
        """Forget the last operation, on which the ranks did not agree."""
        self._before = (None, 0)


class _CallSite:
    """An operation of a program, with the names that it uses in turn."""

    __slots__ = ("_operations", "_turn")

    def __init__(self, name: str) -> None:
        self._operations = [NamedOperation(f"{name}.{turn}") for turn in range(PERIOD)]
        self._turn = -1

    def next(self) -> NamedOperation:
        self._turn = (self._turn + 1) % PERIOD
        return self._operations[self._turn]
