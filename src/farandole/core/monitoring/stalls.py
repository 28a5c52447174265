"""Stalls: operations that some ranks wait for and others have not asked for. The log says which, and who is missing."""

import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from farandole._native import Engine
from farandole.config import Config
from farandole.errors import spell_ranks

__all__ = ["Stall", "StallInspector", "describe"]

log = logging.getLogger(__name__)

MOST_NAMES = 6  # in one warning


@dataclass(frozen=True, slots=True)
class Stall:
    """One operation that has not come together: ranks are the job's, `seconds` passed since the first one asked."""

    name: str
    seconds: float
    asked: tuple[int, ...]
    missing: tuple[int, ...]  # none: of this group, no rank has asked for some members


def describe(stalls: Iterable[Stall], limit: float, whose: str = "") -> Iterator[str]:
    """Say in a sentence or two, for each set of ranks that is missing, what waits for it.

    `limit` is after how many seconds the waiting ranks give up, 0 for never; `whose` is the process set's name."""

    def parties(stall: Stall) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return stall.missing, stall.asked

    among = f" of {whose}" if whose else ""
    for (missing, asked), members in groupby(sorted(stalls, key=parties), key=parties):
        waiting = sorted(members, key=lambda stall: -stall.seconds)
        names = ", ".join(stall.name for stall in waiting[:MOST_NAMES])
        more = f" and {len(waiting) - MOST_NAMES} more" if len(waiting) > MOST_NAMES else ""
        until = f"They give up after {limit:g} s." if limit else "They will wait for ever."
        who, seconds = spell_ranks(asked), waiting[0].seconds
        if missing:
            yield (
                f"{who}{among} waited {seconds:.0f} s for {spell_ranks(missing)} to ask for {names}{more}. {until} Who "
                "is missing may be slower, have less data (join() is for that), have taken another branch, or ask for "
                "operations in another order while each one is waited for"
            )
        else:
            yield (
                f"{who}{among} waited {seconds:.0f} s for the rest of {names}{more}: no rank has asked for some of "
                f"the members. {until}"
            )


class StallInspector:
    """Looks at engines whose coordinator this rank is, and warns when something has waited for `stall_check_time`.

    It warns again each time as much time has passed. Has a thread of its own while it follows an engine."""

    def __init__(self, config: Config) -> None:
        self._after = config.stall_seconds
        self._limit = config.patience_seconds
        self._engines: dict[Engine, str] = {}
        self._warned: dict[tuple[Engine, str], float] = {}  # after how many seconds the last time
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, engine: Engine, whose: str = "") -> None:
        """Look at `engine` from now on; `whose` is the name of its process set."""
        if self._after == 0:
            return
        with self._lock:
            self._engines[engine] = whose
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="farandole-stalls", daemon=True)
                self._thread.start()

    def leave(self, engine: Engine) -> None:
        """Follow `engine` no longer. Idempotent."""
        with self._lock:
            self._engines.pop(engine, None)

    def close(self) -> None:
        """Stop, for good. Idempotent."""
        self._stop.set()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(min(self._after / 4, 5)):
            with self._lock:
                due = {whose: self._due(engine) for engine, whose in self._engines.items()}
            for whose, stalls in due.items():
                for sentence in describe(stalls, self._limit, whose):
                    log.warning("stall: %s", sentence)

    def _due(self, engine: Engine) -> list[Stall]:
        stalls = [
            Stall(name, seconds, tuple(asked), tuple(missing)) for name, seconds, asked, missing in engine.stalls()
        ]
        before = {key: value for key, value in self._warned.items() if key[0] is engine}
        for key in before:
            del self._warned[key]
        due = []
        for stall in stalls:
            # Fewer seconds than at the last warning: the same name is waited for anew.
            warned = before.get((engine, stall.name), 0.0)
            if stall.seconds < warned or stall.seconds >= warned + self._after:
                due.append(stall)
                warned = stall.seconds
            self._warned[engine, stall.name] = warned
        return due
