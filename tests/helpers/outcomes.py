"""What became of a rank in a test, and the text in which all ranks' failures are told."""

import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

__all__ = ["Death", "Outcome", "RanksFailed"]


@dataclass(frozen=True, slots=True)
class Death:
    """How a rank's process ended without a word; the result of a rank that was expected to die."""

    returncode: int

    def __str__(self) -> str:
        if self.returncode < 0:
            return f"was killed by {signal.Signals(-self.returncode).name}"
        return f"ended with exit code {self.returncode} and no result"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The value that a rank returned, or what it raised, or where it stood when its time was over."""

    rank: int
    value: object = None
    error: BaseException | None = None
    trace: str = ""  # empty: the rank has returned
    output: str = ""

    @classmethod
    def of_error(cls, rank: int, error: BaseException) -> Self:
        """Keep `error` with its traceback."""
        return cls(rank=rank, error=error, trace="".join(traceback.format_exception(error)))

    @property
    def failed(self) -> bool:
        """Did the rank end in any way but by returning?"""
        return bool(self.trace)


class RanksFailed(AssertionError):
    """Some ranks failed; holds one titled trace for each, the first failure first, and `errors` by rank."""

    def __init__(self, size: int, failures: Iterable[Outcome]) -> None:
        failures = list(failures)
        self.errors = {each.rank: each.error for each in failures if each.error is not None}
        self.ranks = [each.rank for each in failures]
        parts = [f"{len(failures)} of {size} ranks failed"]
        for each in failures:
            parts.append(f"----- rank {each.rank} -----\n{each.trace.rstrip()}")
            if each.output.strip():
                parts.append(f"----- output of rank {each.rank} -----\n{each.output.rstrip()}")
        super().__init__("\n".join(parts))
