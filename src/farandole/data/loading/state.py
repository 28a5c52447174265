"""State of a loader: a few integers, from which any number of ranks can continue."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

__all__ = ["MOVED", "NO_SEED", "NO_VERSION", "State"]

NO_SEED = -1
NO_VERSION = -1
MOVED = (
    "this iterator's loader was moved, by another iterator, set_epoch, load_state_dict or resize, or this process was "
    "forked since it began; iterate over it anew, and make a loader for each iterator that is used at the same time"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Position of all ranks together in an epoch: the first `visited` rows of its order have been visited.

    In a `FeedLoader`'s state, `visited` counts steps. `seed`, `lanes`, `window` and `permuted` define the order; `seed`
    is -1 if nothing is shuffled, `permuted` is 0 if row groups keep their order. `fingerprint` identifies the row
    groups by their sizes. `version` is the version of a table or the id of its snapshot, -1 for data without versions.
    """

    epoch: int
    visited: int
    seed: int
    lanes: int
    window: int
    fingerprint: int
    version: int = NO_VERSION
    permuted: int = 1

    @classmethod
    def of(cls, found: Mapping[str, int]) -> Self:
        """Return the state in a result of `asdict`; raises `ValueError` for another dictionary."""
        names = {each.name for each in fields(cls)}
        if set(found) | {"version", "permuted"} != names or not all(isinstance(value, int) for value in found.values()):
            raise ValueError(f"a loader's state holds the integers {', '.join(sorted(names))}, got {dict(found)}")
        return cls(**found)
