"""Order in which an epoch visits all rows of all ranks: a function of seed, epoch and the row groups' sizes.

The order does not depend on the number of ranks. The row groups are permuted and laid end to end. This line of rows is
cut into `lanes` parts, whose lengths differ by at most one row. The lanes are visited in turns, one row of each; within
a lane, rows are shuffled in windows. So a rank that takes the rows of some lanes reads only their row groups, and holds
only a window of each.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

# Numbers of lanes that many numbers of ranks divide.
_LANES = (96, 48, 24, 12, 8, 4, 2)

# Row groups from which the rows of a round come, at least: 24 random places have 9 of 10 equally frequent labels.
MIXED = 24

# Spawn keys of the two kinds of permutation. They differ, so that no window is shuffled as the row groups are.
_GROUPS, _WINDOW = 0, 1


@dataclass(frozen=True, slots=True)
class Extent:
    """Rows `first` to `last` (half-open) of one row group."""

    row_group: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The orders of all epochs over row groups of `row_groups[0]`, `row_groups[1]`, ... rows.

    `window` is the number of consecutive rows of a lane that are shuffled together. Without a seed nothing is shuffled.
    If not `permuted`, only the rows of windows are shuffled, and the row groups keep their order.
    Raises `ValueError` for negative counts of rows, and for lanes or windows below 1.
    """

    row_groups: Sequence[int] | NDArray[np.int64]
    lanes: int
    window: int
    seed: int | None
    permuted: bool = True
    rows: int = field(init=False)  # of an epoch

    def __post_init__(self) -> None:
        counts = np.asarray(self.row_groups, np.int64)
        if len(counts) and counts.min() < 0:
            raise ValueError(f"row_groups must be counts >= 0, got {self.row_groups}")
        object.__setattr__(self, "rows", int(counts.sum()))
        if self.lanes < 1 or self.window < 1:
            raise ValueError(f"lanes and window must be >= 1, got {self.lanes} and {self.window}")

    @property
    def round_rows(self) -> int:
        """Rows of a round, which is one window of each lane. Round k begins at position k * round_rows."""
        return self.lanes * self.window

    @property
    def rounds(self) -> int:
        """The number of rounds of an epoch."""
        return -(-self.rows // self.round_rows)

    def epoch(self, epoch: int) -> "EpochOrder":
        """Return the order of this epoch; raises `ValueError` for a negative one."""
        return EpochOrder(self, epoch)


class EpochOrder:
    """Order of one epoch. Its row p is row p // lanes of lane p % lanes."""

    def __init__(self, order: Order, epoch: int) -> None:
        self.order, self._epoch = order, epoch
        count = len(order.row_groups)
        self._groups = self._permuted(count, _GROUPS, 0, 0) if order.permuted else np.arange(count)
        # ends[i]: rows of the first i row groups, in this epoch's order of row groups.
        self._ends = np.concatenate([[0], np.cumsum(np.asarray(order.row_groups, np.int64)[self._groups])])

    def window_rows(self, lane: int, number: int) -> int:
        """Return how many rows the lane has in round `number`: `window`, fewer in its last round, then 0."""
        first, last = self._span(lane, number)
        return last - first

    def extents(self, lane: int, number: int) -> Iterator[Extent]:
        """Yield the extents of the lane's window in round `number`; `shuffled` counts rows in the order of extents."""
        first, last = self._span(lane, number)
        groups, ends = self._groups.data, self._ends.data  # single numbers are found faster than in arrays
        place = bisect_right(ends, first) - 1
        while first < last:
            start, until = ends[place], min(last, ends[place + 1])
            if first < until:
                yield Extent(groups[place], first - start, until - start)
            first, place = until, place + 1

    def shuffled(self, lane: int, number: int) -> NDArray[np.int64]:
        """Return the order in which the rows of the lane's window in round `number` are visited."""
        return self._permuted(self.window_rows(lane, number), _WINDOW, lane, number)

    def _span(self, lane: int, number: int) -> tuple[int, int]:
        order = self.order
        each, more = divmod(order.rows, order.lanes)
        start = lane * each + min(lane, more)
        end = start + each + (lane < more)
        first = start + number * order.window
        return min(end, first), min(end, first + order.window)

    def _permuted(self, count: int, *key: int) -> NDArray[np.int64]:
        seed = self.order.seed
        # Making a random generator takes 0.1 ms. Skip it for windows of one row, which lanes of large samples have.
        return np.arange(count) if seed is None or count < 2 else permutation(count, self._epoch, *key, seed=seed)


def permutation(count: int, *key: int, seed: int) -> NDArray[np.int64]:
    """Return the numbers 0..count-1 in an order that depends on the arguments only.

    Raises `ValueError` if the seed or a part of the key is negative."""
    # The seed is the entropy, and the key the spawn key, so that seed 1 epoch 23 differs from seed 12 epoch 3.
    stream = np.random.SeedSequence(seed, spawn_key=key)
    return np.random.Generator(np.random.PCG64(stream)).permutation(count).astype(np.int64, copy=False)


def choose_lanes(
    row_groups: Sequence[int] | NDArray[np.int64], nbytes: int, *, most_bytes: int, per_lane: int = 8
) -> int:
    """Return a number of lanes for these row groups, all of which together take `nbytes` of memory.

    Neighbouring lanes share a row group at their ends, and both read it. So more than 8 lanes have at least `per_lane`
    row groups each, and up to 8 lanes at least four each, which lets several ranks share few row groups. One row group
    of each lane fits into `most_bytes`.
    """
    count = max(1, int(np.count_nonzero(np.asarray(row_groups, np.int64) > 0)))
    fitting = most_bytes * count // max(1, nbytes)
    enough = (lanes for lanes in _LANES if (4 if lanes <= 8 else per_lane) * lanes <= count)
    return next((lanes for lanes in enough if lanes <= fitting), 1)


def choose_window(
    row_groups: NDArray[np.int64], lanes: int, row_bytes: int, *, usual_bytes: int, most_bytes: int
) -> int:
    """Return a window for these row groups, whose rows take `row_bytes` of memory.

    A round takes `usual_bytes`. If there are few lanes, a round takes more, up to `most_bytes`, so that its rows come
    from many row groups. Then all rounds are about equally long, because a short one would mix few rows."""
    usual = usual_bytes // row_bytes
    count, rows = int(np.count_nonzero(row_groups)), int(row_groups.sum())
    # The window of a lane has rows of the row group where it begins, and of as many more as it is long.
    wanted = min((MIXED - lanes) * rows // max(1, count), rows, most_bytes // row_bytes)
    if wanted <= usual:
        return usual // lanes
    rounds = -(-rows // wanted)
    return -(-rows // (rounds * lanes))
