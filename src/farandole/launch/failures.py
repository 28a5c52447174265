"""Failures of ranks, and the choice of the one that caused the others."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farandole.errors import CollectiveTimeout, EngineClosed, PeerLost, RankFailed, RendezvousError

if TYPE_CHECKING:  # ranks import this module, but not the one that starts processes
    from farandole.launch.processes import Exit

__all__ = ["Failure", "culprit", "exit_failure", "is_consequence"]

# Errors that a rank raises because another rank failed or is missing.
CONSEQUENCES = (PeerLost, EngineClosed, CollectiveTimeout, RendezvousError)
# Native code that loses its peer calls abort or writes to the closed connection.
OWN_SIGNALS = (signal.SIGABRT, signal.SIGPIPE)
_CONSEQUENCE_LINES = tuple(f"{each.__module__}.{each.__qualname__}:" for each in CONSEQUENCES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The failure of one rank, as its launcher sees it."""

    rank: int
    reason: str
    code: int  # as a shell reports it: 128 + signal for a rank killed by a signal
    at: float = field(default_factory=time.monotonic)
    killed: bool = False  # by a signal that another rank's failure does not cause
    consequence: bool = False  # the rank failed because another one had failed
    traceback: str = ""
    tail: tuple[str, ...] = ()
    cause: BaseException | None = None

    def error(self) -> RankFailed:
        """Return the exception to raise; its `__cause__` is the rank's own exception if that could be sent here."""
        error = RankFailed(self.rank, self.reason, self.traceback, self.tail)
        error.__cause__ = self.cause
        return error


def is_consequence(error: BaseException) -> bool:
    """Return whether `error` on one rank says that another rank failed."""
    return isinstance(error, CONSEQUENCES)


def exit_failure(exit: "Exit", tail: Sequence[str]) -> Failure:
    """Return the failure of a rank of which only exit and output are known."""
    return Failure(
        rank=exit.rank,
        reason=exit.reason,
        code=exit.shell_code,
        at=exit.at,
        killed=exit.code < 0 and -exit.code not in OWN_SIGNALS,
        # Python ends the trace of an uncaught exception with this line, the only sign that a program gives.
        consequence=any(line.startswith(_CONSEQUENCE_LINES) for line in tail),
        tail=tuple(tail),
    )


def culprit(failures: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others: a killed rank, else the first that is no consequence."""
    return min(failures, key=lambda each: (not each.killed, each.consequence, each.at, each.rank))
