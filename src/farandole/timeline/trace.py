"""One rank's operations, read from its timeline. All times are nanoseconds of its host's steady clock."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class Operation(NamedTuple):
    """One collective operation of one tensor on one rank."""

    track: str  # the tensor, preceded by its process set
    tensor: str
    kind: str  # allreduce, barrier, ...
    asked: int | None  # when this rank requested it; None: unknown
    begin: int  # when it began, after all ranks had agreed
    end: int
    bytes: int
    queued: int = 0  # the time from the agreement of all ranks to `begin`, in which earlier operations ran
    algorithm: str = ""  # the engine's name for the algorithm; empty: unknown, from an older file

    @property
    def waited(self) -> int:
        """The time from the request to the agreement of all ranks."""
        return 0 if self.asked is None else self.begin - self.queued - self.asked


@dataclass(slots=True)
class RankTrace:
    """One rank's timeline."""

    rank: int
    host: str | None = None  # None: unknown, from an older file
    size: int | None = None  # the number of ranks of the job; None: unknown
    operations: list[Operation] = field(default_factory=list)  # in the order of their ends
    tracks: dict[int, str] = field(default_factory=dict)  # by number
    others: list[dict[str, Any]] = field(default_factory=list)  # all other events, unchanged

    def shifted(self, by: int) -> "RankTrace":
        """Return this timeline with all times `by` nanoseconds later."""
        if not by:
            return self
        operations = [
            each._replace(
                asked=None if each.asked is None else each.asked + by, begin=each.begin + by, end=each.end + by
            )
            for each in self.operations
        ]
        others = [{**other, "ts": other["ts"] + by / 1e3} for other in self.others]
        return replace(self, operations=operations, others=others)
