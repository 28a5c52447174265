"""What became of a rank in a test, and the text in which all ranks' failures are told."""

import math
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
    at: float = math.inf  # when the body failed, on the clock that all processes of a machine share

    @classmethod
    def of_error(cls, rank: int, error: BaseException, at: float) -> Self:
        """Keep `error` with its traceback as text: the frames would keep alive what the rank held."""
        trace = "".join(traceback.format_exception(error))
        chained: BaseException | None = error
        while chained is not None:
            traceback.clear_frames(chained.__traceback__)
            chained.__traceback__ = None
            chained = chained.__cause__ or chained.__context__
        return cls(rank=rank, error=error, trace=trace, at=at)

    @property
    def failed(self) -> bool:
        """Did the rank end in any way but by returning?"""
        return bool(self.trace)


class RanksFailed(AssertionError):
    """Some ranks failed; holds one titled trace for each, the first failure first, and `errors` by rank."""

    def __init__(self, size: int, failures: Iterable[Outcome]) -> None:
        failures = sorted(failures, key=lambda each: each.at)
        self.errors = {each.rank: each.error for each in failures if each.error is not None}
        self.ranks = [each.rank for each in failures]
        parts = [f"{len(failures)} of {size} ranks failed"]
        for each in failures:
            parts.append(f"----- rank {each.rank} -----\n{each.trace.rstrip()}")
            if each.output.strip():
                parts.append(f"----- output of rank {each.rank} -----\n{each.output.rstrip()}")
        super().__init__("\n".join(parts))
