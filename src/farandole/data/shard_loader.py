"""One rank's batches of an epoch, out of its shard and the plan that all ranks share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farandole.data.shard import Column, Number
from farandole.data.sharding import StepsPlan
from farandole.data.shuffle import permutation


@dataclass(frozen=True, slots=True)
class ShardBatch:
    """What one rank works on in one step."""

    columns: Mapping[str, NDArray[Number]]
    rows: int
    weight: float  # see StepsPlan.weight


@dataclass(frozen=True, kw_only=True)
class ShardLoader:
    """Batches of the rows `rows` of a shard, as the plan says.

    With a seed each epoch has its own order, a function of (seed, epoch, rank); without one rows come as listed.
    """

    columns: Mapping[str, Column]
    rows: NDArray[np.int64]
    plan: StepsPlan
    rank: int
    seed: int | None

    def __post_init__(self) -> None:
        if len(self.rows) != self.plan.rows[self.rank]:
            raise ValueError(f"the plan gives rank {self.rank} {self.plan.rows[self.rank]} rows, not {len(self.rows)}")

    def epoch(self, epoch: int) -> Iterator[ShardBatch]:
        """Yield as many batches on every rank, each row in one of them; an empty batch has 0 rows."""
        order = self.rows
        if self.seed is not None:
            order = self.rows[permutation(len(self.rows), seed=self.seed, epoch=epoch, shard=self.rank)]
        for step in range(self.plan.steps):
            first, last = self.plan.bounds(self.rank, step)
            taken = {name: column.take(order[first:last]) for name, column in self.columns.items()}
            yield ShardBatch(taken, last - first, self.plan.weight(self.rank, step))
