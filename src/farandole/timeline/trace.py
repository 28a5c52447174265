"""One rank's operations, read from its timeline. All times are nanoseconds of its host's steady clock."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

__all__ = ["Operation", "RankTrace"]


class Operation(NamedTuple):
    """One collective operation of one tensor on one rank."""

    track: str  # the tensor, behind its process set
    tensor: str
    kind: str  # allreduce, barrier, ...
    asked: int | None  # when this rank asked for it; None: unknown
    begin: int  # when all ranks had agreed, and it began
    end: int
    bytes: int
    queued: int = 0  # for so long before `begin` all ranks had agreed, and this one was busy with what came before
    algorithm: str = ""  # what moved and combined the data, as the engine calls it; empty: older files do not say

    @property
    def waited(self) -> int:
        """From the request to the agreement of all ranks."""
        return 0 if self.asked is None else self.begin - self.queued - self.asked


@dataclass(slots=True)
class RankTrace:
    """One rank's timeline."""

    rank: int
    host: str | None = None  # None: older files do not say
    size: int | None = None  # how many ranks the job had, if the file says so
    operations: list[Operation] = field(default_factory=list)  # in the order in which they ended
    tracks: dict[int, str] = field(default_factory=dict)  # by number
    others: list[dict[str, Any]] = field(default_factory=list)  # events that are no operations, as they stood

    def shifted(self, by: int) -> "RankTrace":
        """The same, `by` nanoseconds later."""
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
