"""Which rows a rank takes in which step, when ranks hold different numbers of rows."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsPlan:
    """The steps of one epoch over ranks that hold `rows[0]`, `rows[1]`, ... rows.

    Guarantees: every rank does the same number of steps, every row is in exactly one of them, no batch exceeds
    `batch_size`. A rank with fewer rows than steps has empty batches. Raises `ValueError` for counts that make no plan.
    """

    rows: tuple[int, ...]
    batch_size: int

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
        """Steps of an epoch: as few as the fullest rank needs."""
        return -(-max(self.rows) // self.batch_size)

    def bounds(self, rank: int, step: int) -> tuple[int, int]:
        """Return the half-open range, in the rank's own order, of the rows it takes in this step."""
        # With n <= steps * batch_size, consecutive floors of n*s/steps are at most ceil(n/steps) <= batch_size apart.
        held, steps = self.rows[rank], self.steps
        return held * step // steps, held * (step + 1) // steps

    def batch(self, rank: int, step: int) -> int:
        """Return how many rows the rank takes in this step."""
        first, last = self.bounds(rank, step)
        return last - first

    def weight(self, rank: int, step: int) -> float:
        """Return the factor that makes the plain average over ranks the mean over the global batch.

        Every rank computes it from the plan alone; 0 for an empty batch.
        """
        in_step = sum(self.batch(each, step) for each in range(len(self.rows)))
        return self.batch(rank, step) * len(self.rows) / in_step if in_step else 0.0
