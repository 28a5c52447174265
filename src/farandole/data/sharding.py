"""Which rows a rank takes in which step, when ranks hold different numbers of rows."""

from dataclasses import dataclass

from farandole.data.deal import Policy

__all__ = ["StepsPlan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsPlan:
    """The steps of one epoch over ranks that hold `rows[0]`, `rows[1]`, ... rows.

    Guarantees: every rank does the same number of steps, no batch exceeds `batch_size`, and no row is in two batches.
    "join": every row is in one; a rank that lacks rows for full batches spreads them over all steps, and has empty
    batches if it has fewer rows than steps. "drop": all batches are full, in as many steps as the emptiest rank can do.
    "pad": in as many steps as the fullest rank needs; what a rank lacks of full batches, it has to repeat.
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

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return min(self.rows) // self.batch_size if self.policy == "drop" else -(-max(self.rows) // self.batch_size)

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
