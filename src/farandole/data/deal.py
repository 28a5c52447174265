"""Which rows of an epoch's order a rank takes in which step: dealt so that a rank stays with few lanes."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = ["Deal", "Policy"]

# What happens to the rows that do not fill a last step: left out; filled up by repeating rows; shared out as they are.
Policy: TypeAlias = Literal["drop", "pad", "join"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """The steps of an epoch of `rows` rows over `size` ranks, after its first `start` rows have been visited before.

    Step s consists of the `size * batch_size` rows at start + s * size * batch_size and on: the rows of a step depend
    on that product only. Guarantees: all ranks do the same number of steps; each row is in one batch of one rank,
    except the rows that "drop" leaves out; no batch exceeds `batch_size`; the ranks' rows of a step, and so of all
    steps, differ by at most one row. Raises `ValueError` for numbers that make no deal.
    """

    rows: int
    lanes: int
    batch_size: int
    size: int
    start: int
    policy: Policy

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.size < 1 or self.lanes < 1:
            raise ValueError(
                f"batch_size, size and lanes must be >= 1, got {self.batch_size}, {self.size} and {self.lanes}"
            )
        if not 0 <= self.start <= self.rows:
            raise ValueError(f"start must be in 0..{self.rows}, got {self.start}")
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy must be one of {', '.join(get_args(Policy))}, got {self.policy!r}")

    @property
    def step_rows(self) -> int:
        """Rows of a full step of all ranks."""
        return self.size * self.batch_size

    @property
    def steps(self) -> int:
        """Steps that are left of the epoch, the same for every rank."""
        left = self.rows - self.start
        return left // self.step_rows if self.policy == "drop" else -(-left // self.step_rows)

    def after(self, step: int) -> int:
        """Return how many rows of the epoch have been visited when this step is done."""
        return min(self.start + (step + 1) * self.step_rows, self.rows)

    def take(self, rank: int, step: int) -> NDArray[np.int64]:
        """Return the positions in the epoch's order that the rank takes in this step, ascending."""
        first = self.start + step * self.step_rows
        return first + self._pattern(rank, first, self.after(step) - first)

    def stream(self, rank: int, first: int, last: int) -> NDArray[np.int64]:
        """Return the positions from `first` to `last` (half-open) that the rank takes in any step, ascending."""
        full = (self.rows - self.start) // self.step_rows
        until = min(self.steps, -(-(last - self.start) // self.step_rows))
        steps = np.arange(max(0, first - self.start) // self.step_rows, min(until, full))
        begins = self.start + steps * self.step_rows
        taken = np.empty((len(steps), self.batch_size), np.int64)
        for phase in np.unique(begins % self.lanes):
            here = begins % self.lanes == phase
            taken[here] = begins[here, None] + self._pattern(rank, int(phase), self.step_rows)
        # The step that is not full, if the range reaches it.
        rest = [self.take(rank, full)] if until > full else []
        flat = np.concatenate([taken.reshape(-1), *rest])
        ends = np.searchsorted(flat, [first, min(last, self.rows)])
        return flat[ends[0] : ends[1]]

    def takes_whole_lanes(self, first: int, last: int) -> bool:
        """Whether every rank takes all rows of its lanes between these positions."""
        return self.lanes % self.size == 0 and self.start <= first and last <= self.start + self.steps * self.step_rows

    def lanes_of(self, rank: int) -> list[int]:
        """Return the lanes from which the rank takes any row."""
        phases = {(self.start + step * self.step_rows) % self.lanes for step in range(min(self.steps, self.lanes))}
        patterns = [phase + self._pattern(rank, phase, self.step_rows) for phase in phases]
        patterns += [self.take(rank, self.steps - 1)] if self.steps else []
        return sorted({int(lane) for pattern in patterns for lane in pattern % self.lanes})

    def _pattern(self, rank: int, first: int, rows: int) -> NDArray[np.int64]:
        """Return the rank's positions in a step of `rows` rows that begins at position `first`, counted from there.

        The lanes stand in a row, those with the same remainder by the number of ranks side by side, and the step's
        rows with their lanes. Each rank takes as many of them as the step has positions with its own remainder, from
        where the rank before it ended. When the number of ranks divides that of lanes, these are all rows of its own
        lanes, whatever `first` is.
        """
        standing = sorted(range(self.lanes), key=lambda lane: (lane % self.size, lane))
        shares = [len(range((each - first) % self.size, rows, self.size)) for each in range(rank + 1)]
        begin, end = sum(shares[:rank]), sum(shares)
        parts, passed = [], 0
        for lane in standing:
            mine = np.arange((lane - first) % self.lanes, rows, self.lanes)
            parts.append(mine[max(0, begin - passed) : max(0, end - passed)])
            passed += len(mine)
        return np.sort(np.concatenate(parts))
