"""Failures of ranks, and the choice of the one that caused the others."""

import base64
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from farandole.errors import CollectiveTimeout, EngineClosed, PeerLost, RankFailed, RendezvousError
from farandole.launch.exceptions import dump_exception, load_exception
from farandole.masking import mask

# Errors that a rank raises because another rank failed or is missing.
CONSEQUENCES = (PeerLost, EngineClosed, CollectiveTimeout, RendezvousError)
OUTPUT_REFUSED = "was ended because its output could not be written"  # the error of the attempt follows
LONGEST_TEXT = 1 << 18  # characters; the end of a traceback is what matters
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
    no_cause: str = ""  # the reason why the rank's exception is not here

    def error(self, earlier: Sequence[str] = ()) -> RankFailed:
        """Return the exception to raise; its `__cause__` is the rank's own exception if that could be sent here.

        `earlier` has the failures of the attempts before."""
        error = RankFailed(self.rank, self.reason, self.traceback, self.tail, earlier)
        error.__cause__ = self.cause
        if self.cause is None and self.no_cause:
            error.add_note(mask(f"The exception of rank {self.rank} is not the cause of this error: {self.no_cause}."))
        return error


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """The end of a rank's process."""

    rank: int
    code: int  # as in subprocess: below zero the number of the signal
    at: float  # time.monotonic() of the rank's host at the end
    reason: str

    @property
    def shell_code(self) -> int:
        """The exit code as a shell reports it: 128 + the number of the signal."""
        return 128 - self.code if self.code < 0 else self.code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def reason_of(code: int) -> str:
    """Describe how a process ended, given its exit code as in `subprocess`."""
    if code >= 0:
        return f"exited with code {code}"
    hints: dict[int, str] = {
        signal.SIGKILL: " (the system's out-of-memory killer does that; so does `kill -9`)",
        signal.SIGSEGV: " (a crash in native code)",
        signal.SIGBUS: " (a crash in native code; a full /dev/shm does that)",
        signal.SIGABRT: " (native code called abort)",
    }
    return f"was killed by {_signal_name(-code)}{hints.get(-code, '')}"


def is_consequence(error: BaseException) -> bool:
    """Return whether `error` on one rank reports that another rank failed."""
    return isinstance(error, CONSEQUENCES)


def exit_failure(exit: Exit, tail: Sequence[str]) -> Failure:
    """Return the failure of a rank from its exit and the last lines of its output."""
    return Failure(
        rank=exit.rank,
        reason=exit.reason,
        code=exit.shell_code,
        at=exit.at,
        killed=exit.code < 0 and -exit.code not in OWN_SIGNALS,
        # Python ends the traceback of an uncaught exception with such a line, the only sign from a program.
        consequence=any(line.startswith(_CONSEQUENCE_LINES) for line in tail),
        tail=tuple(tail),
    )


def culprit(failures: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others: a killed rank, else the first that is no consequence."""
    return min(failures, key=lambda each: (not each.killed, each.consequence, each.at, each.rank))


def to_payload(failure: Failure) -> dict[str, object]:
    """Return a rank's failure as plain values, with its exception if that can be pickled."""
    pickled = b"" if failure.cause is None else dump_exception(failure.cause)
    return {
        "reason": failure.reason[:LONGEST_TEXT],
        "code": failure.code,
        "killed": failure.killed,
        "consequence": failure.consequence,
        "traceback": failure.traceback[-LONGEST_TEXT:],
        "tail": list(failure.tail),
        "exception": base64.b64encode(pickled).decode(),
        "no_cause": failure.no_cause,
    }


def from_payload(rank: int, payload: Mapping[str, object], at: float) -> Failure:
    """Return the failure that `to_payload` wrote; `at` is a time of this host, because clocks of hosts are unrelated.

    Unpickles the exception, so the payload must come from a peer that has proved the job's secret."""
    tail, code, pickled = payload["tail"], payload["code"], payload["exception"]
    assert isinstance(tail, list) and isinstance(code, int) and isinstance(pickled, str), payload
    cause, why = load_exception(base64.b64decode(pickled))
    return Failure(
        rank=rank,
        reason=str(payload["reason"]),
        code=code,
        at=at,
        killed=bool(payload["killed"]),
        consequence=bool(payload["consequence"]),
        traceback=str(payload["traceback"]),
        tail=tuple(str(line) for line in tail),
        cause=cause,
        no_cause=why or str(payload["no_cause"]),
    )
