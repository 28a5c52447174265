"""Outcome of a rank in a test, and the error that shows the failures of all ranks."""

import math
import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Death:
    """End of a rank's process without a result; the result of a rank that is expected to die."""

    returncode: int

    def __str__(self) -> str:
        if self.returncode < 0:
            return f"was killed by {signal.Signals(-self.returncode).name}"
        return f"ended with exit code {self.returncode} and no result"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The value that a rank returned, the error that it raised, or the stack where it hung."""

    rank: int
    value: object = None
    error: BaseException | None = None
    trace: str = ""  # "": the rank has returned
    output: str = ""
    at: float = math.inf  # when the body failed, on a clock that all processes of the machine share

    @classmethod
    def of_error(cls, rank: int, error: BaseException, at: float) -> Self:
        """Return an outcome with `error` and its traceback as text; frames would keep the rank's objects alive."""
        trace = "".join(traceback.format_exception(error))
        chained: BaseException | None = error
        while chained is not None:
            traceback.clear_frames(chained.__traceback__)
            chained.__traceback__ = None
            chained = chained.__cause__ or chained.__context__
        return cls(rank=rank, error=error, trace=trace, at=at)

    @property
    def failed(self) -> bool:
        """Return whether the rank did anything but return."""
        return bool(self.trace)


class RanksFailed(AssertionError):
    """Some ranks failed. The message has a titled trace for each, first failure first; `errors` are by rank."""

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
