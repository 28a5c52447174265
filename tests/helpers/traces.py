"""Synthetic timelines, in the form that ranks write."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Op(NamedTuple):
    """An operation; times in microseconds."""

    tensor: str
    asked: float | None
    begin: float
    end: float
    bytes: int = 4000
    kind: str = "allreduce"
    set: str = ""  # prefix of the track's name for a process set
    queued: float = 0.0
    algorithm: str = ""  # only in older files


def spell_trace(rank: int, ops: Sequence[Op], **about: Any) -> str:
    """Return the timeline of `rank` as text: a JSON array with a line for each event."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}", **about}}
    ]
    tracks: dict[str, int] = {}
    for op in ops:
        shown = f"{op.set}{op.tensor}"
        if shown not in tracks:
            tracks[shown] = len(tracks) + 1
            track = {"pid": rank, "tid": tracks[shown]}
            events.append({"name": "thread_name", "ph": "M", "args": {"name": shown}, **track})
        place = {"pid": rank, "tid": tracks[shown], "ph": "X"}
        agreed = op.begin - op.queued
        if op.asked is not None:
            events.append({"name": "negotiate", "ts": op.asked, "dur": agreed - op.asked, **place})
        if op.queued:
            events.append({"name": "queue", "ts": agreed, "dur": op.queued, **place})
        args = {"tensor": op.tensor, "bytes": op.bytes} | ({"algorithm": op.algorithm} if op.algorithm else {})
        events.append({"name": op.kind, "ts": op.begin, "dur": op.end - op.begin, "args": args, **place})
    return "[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n"


def write_trace(path: Path, rank: int, ops: Sequence[Op], **about: Any) -> Path:
    """Write the timeline of `rank` to `path`; return the path."""
    path.write_text(spell_trace(rank, ops, **about))
    return path
