"""Counters of a rank's operations since its start."""

import threading
from collections import Counter
from dataclasses import asdict

from farandole._native import Engine
from farandole.core.autotune.knobs import Knobs


class Metrics:
    """Sums of the counters of one rank's engines, including the engines of process sets that were removed."""

    def __init__(self) -> None:
        self._engines: set[Engine] = set()
        self._first: Engine | None = None  # the job's engine
        self._ended: Counter[str] = Counter()
        self._lock = threading.Lock()

    def follow(self, engine: Engine) -> None:
        """Include the counters of `engine` from now on."""
        with self._lock:
            self._engines.add(engine)
            self._first = self._first or engine

    def leave(self, engine: Engine) -> None:
        """Keep the counts of `engine`, and release the engine. Idempotent."""
        with self._lock:
            if engine in self._engines:
                self._ended.update(engine.stats())
                self._engines.discard(engine)

    def read(self) -> dict[str, float]:
        """Return all metrics by name. All of them only grow, except `fused` and the knobs.

        operations: collectives that this rank has completed; a group counts as many as it has members.
        bytes: the size of this rank's input to them.
        buckets: the transfers that they took. fused: the share of operations that needed no transfer of their own.
        agreed_in_lane: operations that the ranks of one host agreed on in the lane.
        agreed_by_number: requests to rank 0 by number, because the same request was agreed on before.
        agreed_in_full: requests to rank 0 in full.
        wait_seconds: the time that threads waited for operations; waits below a few microseconds are not counted.
        timeline_dropped: events that a timeline had no room for.
        fusion_threshold, slot_bytes, link_chunk, link_small, hierarchical: the current knobs of the job's engine.
        knob_turns: how often the knobs were changed.
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
