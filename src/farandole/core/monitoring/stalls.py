"""Inspector that logs stalls: operations that some ranks have requested and others have not, for too long."""

import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from farandole._native import Engine
from farandole.config import Config
from farandole.errors import spell_ranks

log = logging.getLogger(__name__)

MOST_NAMES = 6  # operations that one warning names


@dataclass(frozen=True, slots=True)
class Stall:
    """An operation that ranks of the job wait for, `seconds` after the first request."""

    name: str
    seconds: float
    asked: tuple[int, ...]
    missing: tuple[int, ...]  # empty: no rank has requested some members of this group


def describe(stalls: Iterable[Stall], limit: float, whose: str = "") -> Iterator[str]:
    """Yield a warning for each set of missing ranks, with the operations that wait for them.

    `limit` is the number of seconds after which the waiting ranks give up, 0 for never. `whose` is the name of the
    process set."""

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
                f"{who}{among} waited {seconds:.0f} s for {spell_ranks(missing)} to ask for {names}{more}. {until} The "
                "missing ranks may be slower, have less data (join() is for that), have taken another branch, or wait "
                "for operations in another order"
            )
        else:
            yield (
                f"{who}{among} waited {seconds:.0f} s for the rest of {names}{more}: no rank has asked for some of "
                f"the members. {until}"
            )


class StallInspector:
    """Checks the engines whose coordinator is this rank, and logs a warning when an operation has stalled.

    It warns every `stall_check_time` while the stall lasts. Its thread runs from the first `follow` until `close`."""

    def __init__(self, config: Config) -> None:
        self._after = config.stall_seconds
        self._limit = config.patience_seconds
        self._engines: dict[Engine, str] = {}
        self._warned: dict[Engine, dict[str, float]] = {}  # by operation: seconds of the stall at the last warning
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, engine: Engine, whose: str = "") -> None:
        """Check `engine` from now on; `whose` is the name of its process set."""
        if self._after == 0:
            return
        with self._lock:
            self._engines[engine] = whose
            if self._thread is None and not self._stop.is_set():
                thread = threading.Thread(target=self._run, name="farandole-stalls", daemon=True)
                thread.start()
                self._thread = thread

    def leave(self, engine: Engine) -> None:
        """Stop checking `engine`. Idempotent."""
        with self._lock:
            self._engines.pop(engine, None)
            self._warned.pop(engine, None)

    def close(self) -> None:
        """End the thread; a later `follow` starts none. Idempotent."""
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
        before, now = self._warned.get(engine, {}), dict[str, float]()
        due = []
        for stall in stalls:
            # Fewer seconds than at the last warning: this is a new request under the same name.
            warned = before.get(stall.name, 0.0)
            if stall.seconds < warned or stall.seconds >= warned + self._after:
                due.append(stall)
                warned = stall.seconds
            now[stall.name] = warned
        self._warned[engine] = now
        return due
