"""Names for operations that are matched by their order alone."""

from collections.abc import Hashable
from contextlib import suppress
from typing import Protocol

from farandole.errors import FarandoleError

__all__ = ["Names", "Part", "SinglePart", "Slot"]

PERIOD = 8  # as many operations of one place may be under way
LONGEST_RUN = 8
MOST_PLACES = 1024


class Part(Protocol):
    """An operation under way, as the engine hands it out."""

    def done(self) -> bool: ...

    def wait(self) -> object: ...


class SinglePart(Part, Protocol):
    """One operation, and what the engine has to say of it when it is done."""

    def result(self) -> object: ...

    def received_splits(self) -> list[int]: ...


class Slot:
    """A name, and the operation that was last started under it."""

    __slots__ = ("name", "part")

    def __init__(self, name: str) -> None:
        self.name = name
        self.part: Part | None = None

    def free(self) -> str:
        """Return the name once nothing is under way under it; blocks until then."""
        part, self.part = self.part, None
        if part is not None and not part.done():
            with suppress(FarandoleError):  # whoever asked for it hears of that
                part.wait()
        return self.name


class Names:
    """Gives each operation of a process group its name, the same on all ranks, who ask for them in one order.

    They could be counted, but what is asked for again under the name that it had before is agreed in a fraction of the
    time, and training asks for the same things step after step. Were names made of what is asked for (kind, dtype,
    shape), ranks that differ in that would wait for each other until the time is over. So an operation is named after
    the one *before* it, on which the ranks agreed: those that differ now meet under one name, and hear so."""

    def __init__(self) -> None:
        self._places: dict[Hashable, _Place] = {}
        self._others = _Place("other")  # of a program that never repeats itself
        self._before: tuple[Hashable, int] = (None, 0)

    def next(self, signature: Hashable) -> Slot:
        """Return the name of the next operation; `signature` is what all ranks ask for alike if they are right."""
        place = self._places.get(self._before)
        if place is None:
            place = self._others
            if len(self._places) < MOST_PLACES:
                place = self._places[self._before] = _Place(str(len(self._places)))
        last, run = self._before
        self._before = (signature, min(run + 1, LONGEST_RUN) if signature == last else 1)
        return place.next()

    def start_over(self) -> None:
        """Forget the last operation, on whose kind the ranks did not agree."""
        self._before = (None, 0)


class _Place:
    """Where in a program an operation stands: the names that it has in turn."""

    __slots__ = ("_slots", "_turn")

    def __init__(self, name: str) -> None:
        self._slots = [Slot(f"{name}.{turn}") for turn in range(PERIOD)]
        self._turn = -1

    def next(self) -> Slot:
        self._turn = (self._turn + 1) % PERIOD
        return self._slots[self._turn]
