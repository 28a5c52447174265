"""Which rank failed, how, and which of several failures was the first cause."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farandole.errors import CollectiveTimeout, EngineClosed, PeerLost, RankFailed, RendezvousError

if TYPE_CHECKING:  # a rank asks here whether it is a consequence, and starts no processes
    from farandole.launch.processes import Exit

__all__ = ["Failure", "culprit", "exit_failure", "is_consequence"]

# What a rank raises because another one failed or is not there.
CONSEQUENCES = (PeerLost, EngineClosed, CollectiveTimeout, RendezvousError)
# Native code that loses its peer calls abort or writes to the closed connection.
OWN_SIGNALS = (signal.SIGABRT, signal.SIGPIPE)
_CONSEQUENCE_LINES = tuple(f"{each.__module__}.{each.__qualname__}:" for each in CONSEQUENCES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One rank's failure, as far as its launcher knows."""

    rank: int
    reason: str
    code: int  # what a shell would report: 128 + signal for a rank killed by a signal
    at: float = field(default_factory=time.monotonic)
    killed: bool = False  # by a signal that no other rank's failure brings about
    consequence: bool = False  # it fell because another rank had fallen
    traceback: str = ""
    tail: tuple[str, ...] = ()
    cause: BaseException | None = None

    def error(self) -> RankFailed:
        """The exception to raise, `__cause__` set to the rank's own where it could be brought here."""
        error = RankFailed(self.rank, self.reason, self.traceback, self.tail)
        error.__cause__ = self.cause
        return error


def is_consequence(error: BaseException) -> bool:
    """Does `error` on one rank say that another rank is the one to look at?"""
    return isinstance(error, CONSEQUENCES)


def exit_failure(exit: "Exit", tail: Sequence[str]) -> Failure:
    """The failure of a rank of which only its exit and its output are known."""
    return Failure(
        rank=exit.rank,
        reason=exit.reason,
        code=exit.shell_code,
        at=exit.at,
        killed=exit.code < 0 and -exit.code not in OWN_SIGNALS,
        # Python ends an uncaught exception's trace with this line; a script has no other way to tell us.
        consequence=any(line.startswith(_CONSEQUENCE_LINES) for line in tail),
        tail=tuple(tail),
    )


def culprit(failures: Sequence[Failure]) -> Failure:
    """The failure that brought the others: a killed rank, else the first that blames nobody else, else the first."""
    return min(failures, key=lambda each: (not each.killed, each.consequence, each.at, each.rank))
