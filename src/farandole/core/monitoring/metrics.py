"""Counters of a rank's operations since its start."""

import threading
from collections import Counter
from dataclasses import asdict

from farandole._native import Engine
from farandole.core.autotune.knobs import Knobs

__all__ = ["Metrics"]


class Metrics:
    """Adds up the counters of the engines of one rank: those of its process sets too, also when these are gone."""

    def __init__(self) -> None:
        self._engines: set[Engine] = set()
        self._first: Engine | None = None  # that of the job
        self._ended: Counter[str] = Counter()
        self._lock = threading.Lock()

    def follow(self, engine: Engine) -> None:
        """Count what `engine` does."""
        with self._lock:
            self._engines.add(engine)
            self._first = self._first or engine

    def leave(self, engine: Engine) -> None:
        """Keep what `engine` has counted, and follow it no longer. Idempotent."""
        with self._lock:
            if engine in self._engines:
                self._ended.update(engine.stats())
                self._engines.discard(engine)

    def read(self) -> dict[str, float]:
        """Return the totals, which only grow, but for `fused`, a share, and what the engine of all ranks works with.

        operations: collectives that this rank has completed; a group counts as many as it has members.
        bytes: what it has put into them.
        buckets: transfers that they took. fused: the share of the operations that needed none of their own.
        agreed_in_lane, agreed_by_number, agreed_in_full: operations on which the ranks of one host agreed by
        themselves; requests to rank 0 by number, because the same was agreed before; and requests in full.
        wait_seconds: what threads spent waiting for operations, moments below some microseconds not counted.
        timeline_dropped: events that a timeline had no room for.
        fusion_threshold, slot_bytes, link_chunk, link_small, hierarchical: as the settings of these names, or autotune,
        have it now. knob_turns: how often that was changed.
        """
        with self._lock:
            total = Counter(self._ended)
            for engine in self._engines:
                total.update(engine.stats())
            knobs, turns, _ = self._first.tuned() if self._first is not None else (None, 0, [])
        operations, buckets = total["operations"], total["buckets"]
        return {
            "operations": operations,
            "bytes": total["bytes"],
            "buckets": buckets,
            "fused": 1 - buckets / operations if operations else 0.0,
            "agreed_in_lane": total["in_lane"],
            "agreed_by_number": total["asked_by_number"],
            "agreed_in_full": total["asked_in_full"],
            "wait_seconds": total["waited_ns"] / 1e9,
            "timeline_dropped": total["trace_dropped"],
            **({} if knobs is None else asdict(Knobs.of_engine(knobs))),
            "knob_turns": turns,
        }
