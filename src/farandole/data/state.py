"""State of a loader: a few integers, enough to go on with any number of ranks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Self

__all__ = ["NO_SEED", "NO_VERSION", "State"]

NO_SEED = -1
NO_VERSION = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The first `visited` rows of the order of `epoch` have been visited, by all ranks together.

    `seed`, `lanes` and `window` make the order (`seed` is -1 where nothing is shuffled); `fingerprint` stands for the
    sizes of the row groups that it is an order of. `version` is that of a table, or the id of its snapshot; -1 for data
    without versions. Raises `ValueError` for a dictionary that is no state.
    """

    epoch: int
    visited: int
    seed: int
    lanes: int
    window: int
    fingerprint: int
    version: int = NO_VERSION

    def as_dict(self) -> dict[str, int]:
        """Return it as a dictionary, for a checkpoint."""
        return asdict(self)

    @classmethod
    def of(cls, found: Mapping[str, int]) -> Self:
        """Return the state of a dictionary that `as_dict` returned."""
        names = {each.name for each in fields(cls)}
        if set(found) | {"version"} != names or not all(isinstance(value, int) for value in found.values()):
            raise ValueError(f"a loader's state holds the integers {', '.join(sorted(names))}, got {dict(found)}")
        return cls(**found)
