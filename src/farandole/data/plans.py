"""Plans of an epoch's steps: over one order of all rows, and over rows that lie on the ranks."""

from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = ["GlobalPlan", "LocalPlan", "Policy"]

# The rows that do not fill a last step are left out, filled up by repeating rows, or shared out as they are.
Policy: TypeAlias = Literal["drop", "pad", "join"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalPlan:
    """Steps over one order of `rows` rows that all ranks can read, after its first `start` rows.

    Step s consists of the `size * batch_size` rows at start + s * size * batch_size and on: the rows of a step depend
    on that product only. Guarantees: all ranks do the same number of steps; each row is in one batch of one rank,
    except the rows that "drop" leaves out; no batch exceeds `batch_size`; the ranks' rows of a step, and so of all
    steps, differ by at most one row. A rank stays with few lanes.
    Raises `ValueError` for numbers that make no plan.
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
    def total(self) -> int:
        """Rows of an epoch."""
        return self.rows

    def at(self, position: int) -> tuple[Self, int]:
        """Return the plan of the rest of an epoch, of which so many rows were visited, and its first step."""
        return replace(self, start=position), 0

    @property
    def stride(self) -> int:
        """Return how far a step moves the position."""
        return self.step_rows

    @property
    def step_rows(self) -> int:
        """Rows of a full step of all ranks."""
        return self.size * self.batch_size

    @property
    def steps(self) -> int:
        """Steps that are left of the epoch, the same for every rank."""
        left = self.rows - self.start
        return left // self.step_rows if self.policy == "drop" else -(-left // self.step_rows)

    @property
    def full_steps(self) -> int:
        """Steps in which every rank takes `batch_size` rows."""
        return (self.rows - self.start) // self.step_rows

    def batch(self, rank: int, step: int) -> int:
        """Return how many rows the rank takes in this step, without repeated ones."""
        return self.batch_size if step < self.full_steps else len(self.take(rank, step))

    def weight(self, rank: int, step: int) -> float:
        """Return the factor that makes the plain average over ranks the mean over the step's rows."""
        if self.policy != "join" or step < self.full_steps:
            return 1.0
        in_step = self.after(step) - self.start - step * self.step_rows
        return self.batch(rank, step) * self.size / in_step

    def after(self, step: int) -> int:
        """Return how many rows of the epoch have been visited when this step is done."""
        return min(self.start + (step + 1) * self.step_rows, self.rows)

    def take(self, rank: int, step: int) -> NDArray[np.int64]:
        """Return the positions in the epoch's order that the rank takes in this step, ascending."""
        first = self.start + step * self.step_rows
        return first + self._pattern(rank, first, self.after(step) - first)

    def stream(self, rank: int, first: int, last: int) -> NDArray[np.int64]:
        """Return the positions from `first` to `last` (half-open) that the rank takes in any step, ascending."""
        full = self.full_steps
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
        """Return whether every rank takes all rows of its lanes between these positions."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPlan:
    """Steps over ranks that hold `rows[0]`, `rows[1]`, ... rows of their own.

    Guarantees: every rank does the same number of steps, no batch exceeds `batch_size`, and no row is in two batches.
    "join": every row is in one; a rank that lacks rows for full batches spreads them over all steps, and has empty
    batches if it has fewer rows than steps. "drop": all batches are full, and there are as many steps as the emptiest
    rank can do. "pad": there are as many steps as the fullest rank needs; a rank repeats rows to make its batches full.
    Raises `ValueError` for counts that make no plan.
    """

    rows: tuple[int, ...]
    batch_size: int
    policy: Policy = "join"

    def __post_init__(self) -> None:
        if not self.rows or min(self.rows) < 0:
            raise ValueError(f"rows must be one count >= 0 per rank, got {self.rows}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {self.batch_size}")

    @property
    def total(self) -> int:
        """Rows of all ranks together."""
        return sum(self.rows)

    def at(self, position: int) -> tuple[Self, int]:
        """Return the plan of the rest of an epoch, of which so many steps were done, and its first step."""
        return self, position

    @property
    def stride(self) -> int:
        """Return how far a step moves the position."""
        return 1

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return min(self.rows) // self.batch_size if self.policy == "drop" else -(-max(self.rows) // self.batch_size)

    @property
    def full_steps(self) -> int:
        """Steps at the beginning in which every rank takes `batch_size` rows."""
        fewest = min(self.rows)
        spread = self.policy == "join" and fewest <= (self.steps - 1) * self.batch_size
        return 0 if spread else fewest // self.batch_size

    @property
    def left_out(self) -> int:
        """Rows of all ranks that are in no batch."""
        return self.total - self.steps * self.batch_size * len(self.rows) if self.policy == "drop" else 0

    def bounds(self, rank: int, step: int) -> tuple[int, int]:
        """Return the half-open range, in the rank's own order, of the rows it takes in this step."""
        held, steps, size = self.rows[rank], self.steps, self.batch_size
        if self.policy != "join" or held > (steps - 1) * size:
            return min(held, step * size), min(held, (step + 1) * size)
        # With n <= steps * batch_size, consecutive floors of n*s/steps are at most ceil(n/steps) <= batch_size apart.
        return held * step // steps, held * (step + 1) // steps

    def batch(self, rank: int, step: int) -> int:
        """Return how many rows the rank takes in this step."""
        first, last = self.bounds(rank, step)
        return last - first

    def weight(self, rank: int, step: int) -> float:
        """Return the factor that makes the plain average over ranks the mean over the global batch.

        Every rank computes it from the plan alone; 0 for an empty batch, and 1 where batches are made full.
        """
        if self.policy != "join":
            return 1.0
        in_step = sum(self.batch(each, step) for each in range(len(self.rows)))
        return self.batch(rank, step) * len(self.rows) / in_step if in_step else 0.0
