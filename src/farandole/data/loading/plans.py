"""Plans of an epoch's steps: over one order of all rows, and over rows that each rank holds."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

# Rows that do not fill a last step are left out ("drop"), filled up with repeated rows ("pad"), or shared out ("join").
Policy: TypeAlias = Literal["drop", "pad", "join"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalPlan:
    """Steps over one order of `rows` rows that all ranks can read, without its first `start` rows.

    Step s consists of the `step_rows` rows from position start + s * step_rows on, so its rows depend on that number
    only. It is size * batch_size, or a smaller number with policy "join", so that it does not depend on `size`.
    Guarantees: all ranks do the same number of steps; each row is in one batch of one
    rank, except the rows that "drop" leaves out; no batch exceeds `batch_size`; the ranks' numbers of rows differ by at
    most one, in each step and over all steps. A rank takes rows of few lanes.
    Raises `ValueError` for arguments out of range.
    """

    rows: int
    lanes: int
    batch_size: int
    size: int
    start: int
    policy: Policy
    of_all_ranks: int = 0  # rows of a step, if not size * batch_size

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
        """Return the plan of the rest of an epoch, of which `position` rows were visited, and the plan's first step."""
        return replace(self, start=position), 0

    @property
    def stride(self) -> int:
        """The rows by which a step advances the position."""
        return self.step_rows

    @property
    def step_rows(self) -> int:
        """The number of rows of a step but the last, on all ranks together."""
        return self.of_all_ranks or self.size * self.batch_size

    @property
    def steps(self) -> int:
        """The number of steps, the same for every rank."""
        left = self.rows - self.start
        return left // self.step_rows if self.policy == "drop" else -(-left // self.step_rows)

    @property
    def full_steps(self) -> int:
        """The number of steps, at the beginning, in which every rank takes `batch_size` rows."""
        return (self.rows - self.start) // self.step_rows if self.step_rows == self.size * self.batch_size else 0

    def batch(self, rank: int, step: int) -> int:
        """Return the number of rows that the rank takes in this step, without repeated ones."""
        return self.batch_size if step < self.full_steps else len(self.take(rank, step))

    def weight(self, rank: int, step: int) -> float:
        """Return the factor for the rank's mean, so that the average over ranks is the mean over the step's rows."""
        if self.policy != "join" or step < self.full_steps:
            return 1.0
        in_step = self.after(step) - self.start - step * self.step_rows
        return self.batch(rank, step) * self.size / in_step

    def after(self, step: int) -> int:
        """Return the number of rows of the epoch that have been visited after this step."""
        return min(self.start + (step + 1) * self.step_rows, self.rows)

    def take(self, rank: int, step: int) -> NDArray[np.int64]:
        """Return the positions in the epoch's order that the rank takes in this step, ascending."""
        first = self.start + step * self.step_rows
        return first + self._pattern(rank, first, self.after(step) - first)

    def stream(self, rank: int, first: int, last: int) -> NDArray[np.int64]:
        """Return the positions from `first` to `last` (half-open) that the rank takes in any step, ascending."""
        full, begin = self.full_steps, max(0, first - self.start) // self.step_rows
        until = min(self.steps, -(-(last - self.start) // self.step_rows))
        steps = np.arange(begin, min(until, full))
        begins = self.start + steps * self.step_rows
        taken = np.empty((len(steps), self.batch_size), np.int64)
        for phase in np.unique(begins % self.lanes):
            here = begins % self.lanes == phase
            taken[here] = begins[here, None] + self._pattern(rank, int(phase), self.step_rows)
        rest = [self.take(rank, step) for step in range(max(begin, full), until)]
        flat = np.concatenate([taken.reshape(-1), *rest])
        ends = np.searchsorted(flat, [first, min(last, self.rows)])
        return flat[ends[0] : ends[1]]

    def takes_whole_lanes(self, first: int, last: int) -> bool:
        """Return whether, between these positions, each lane's rows all belong to one rank."""
        return self.lanes % self.size == 0 and self.start <= first and last <= self.start + self.steps * self.step_rows

    def lanes_of(self, rank: int) -> list[int]:
        """Return the lanes of which the rank takes rows."""
        # Where ranks take equally many rows, a step's pattern depends on the lane in which it begins only.
        period = self.lanes if self.step_rows % self.size == 0 else math.lcm(self.lanes, self.size)
        phases = {(self.start + step * self.step_rows) % period for step in range(min(self.steps, period))}
        patterns = [phase + self._pattern(rank, phase, self.step_rows) for phase in phases]
        patterns += [self.take(rank, self.steps - 1)] if self.steps else []
        return sorted({int(lane) for pattern in patterns for lane in pattern % self.lanes})

    def _pattern(self, rank: int, first: int, rows: int) -> NDArray[np.int64]:
        """Return the rank's positions in a step of `rows` rows that begins at position `first`, relative to `first`.

        The step's rows are sorted by lane, and the lanes by their remainder modulo `size`, then by number. Each rank
        takes the next part of this sequence, after the parts of lower ranks; the part has as many rows as the step has
        positions whose remainder modulo `size` is the rank. If `size` divides `lanes`, the part is all rows of the
        rank's own lanes, for any `first`.
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
    "join": every row is in a batch; a rank that lacks rows for full batches spreads them over all steps, and has empty
    batches if it has fewer rows than steps. "drop": all batches are full; the rank with the fewest rows decides the
    number of steps. "pad": the rank with the most rows decides it; ranks repeat rows to make their batches full.
    Raises `ValueError` for negative counts of rows, and for a batch size below 1.
    """

    rows: tuple[int, ...]
    batch_size: int
    policy: Policy = "join"
    _ranks: Mapping[int, int] = field(init=False, repr=False, compare=False)  # by their number of rows

    def __post_init__(self) -> None:
        if not self.rows or min(self.rows) < 0:
            raise ValueError(f"rows must be one count >= 0 per rank, got {self.rows}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {self.batch_size}")
        object.__setattr__(self, "_ranks", Counter(self.rows))

    @property
    def total(self) -> int:
        """The number of rows on all ranks together."""
        return sum(self.rows)

    def at(self, position: int) -> tuple[Self, int]:
        """Return the plan of an epoch of which `position` steps were done, and the step to continue with."""
        return self, position

    @property
    def stride(self) -> int:
        """The steps by which a step advances the position."""
        return 1

    @property
    def steps(self) -> int:
        """The number of steps of an epoch."""
        return min(self.rows) // self.batch_size if self.policy == "drop" else -(-max(self.rows) // self.batch_size)

    @property
    def full_steps(self) -> int:
        """The number of steps, at the beginning, in which every rank takes `batch_size` rows."""
        fewest = min(self.rows)
        spread = self.policy == "join" and fewest <= (self.steps - 1) * self.batch_size
        return 0 if spread else fewest // self.batch_size

    @property
    def left_out(self) -> int:
        """The number of rows that are in no batch, on all ranks together."""
        return self.total - self.steps * self.batch_size * len(self.rows) if self.policy == "drop" else 0

    def bounds(self, rank: int, step: int) -> tuple[int, int]:
        """Return the half-open range of the rows, in the rank's own order, that the rank takes in this step."""
        return self._bounds(self.rows[rank], step, self.steps)

    def _bounds(self, held: int, step: int, steps: int) -> tuple[int, int]:
        size = self.batch_size
        if self.policy != "join" or held > (steps - 1) * size:
            return min(held, step * size), min(held, (step + 1) * size)
        # With n <= steps * batch_size, consecutive floors of n*s/steps are at most ceil(n/steps) <= batch_size apart.
        return held * step // steps, held * (step + 1) // steps

    def batch(self, rank: int, step: int) -> int:
        """Return the number of rows that the rank takes in this step."""
        first, last = self.bounds(rank, step)
        return last - first

    def in_step(self, step: int) -> int:
        """Return the number of rows that all ranks together take in this step."""
        steps = self.steps
        bounds = ((self._bounds(held, step, steps), ranks) for held, ranks in self._ranks.items())
        return sum((last - first) * ranks for (first, last), ranks in bounds)

    def weight(self, rank: int, step: int) -> float:
        """Return the factor for the rank's mean, so that the average over ranks is the mean over the step's rows.

        Needs no communication. It is 0 for an empty batch, and 1 if policy "drop" or "pad" makes all batches full.
        """
        if self.policy != "join":
            return 1.0
        in_step = self.in_step(step)
        return self.batch(rank, step) * len(self.rows) / in_step if in_step else 0.0
