"""Merged trace of the timelines of several ranks: Chrome's trace event format, object form."""

import json
from collections.abc import Iterator, Mapping, Sequence

from farandole.timeline.clocks import Clock
from farandole.timeline.names import NEGOTIATE, QUEUE
from farandole.timeline.trace import RankTrace


def merge_traces(ranks: Mapping[int, RankTrace], clocks: Sequence[Clock], warnings: Sequence[str]) -> Iterator[str]:
    """Yield the text of one trace with a process per rank, a line per event, and the shifts of `clocks`."""
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    comma = ""
    for _, trace in sorted(ranks.items()):
        for event in _events(trace):
            yield comma + json.dumps(event)
            comma = ",\n"
    about = {
        "clocks": [
            {
                "host": clock.host,
                "ranks": clock.ranks,
                "ahead_us": clock.ahead / 1e3,
                "spread_us": clock.spread / 1e3,
                "operations": clock.meetings,
                "shifted_us": -clock.shift / 1e3,
            }
            for clock in clocks
        ],
        "warnings": list(warnings),
    }
    yield f'\n], "otherData": {json.dumps(about)}}}\n'


def _events(trace: RankTrace) -> Iterator[Mapping[str, object]]:
    facts = {"host": trace.host, "size": trace.size}
    args = {"name": f"rank {trace.rank}", **{key: value for key, value in facts.items() if value is not None}}
    yield {"name": "process_name", "ph": "M", "pid": trace.rank, "args": args}
    yield {"name": "process_sort_index", "ph": "M", "pid": trace.rank, "args": {"sort_index": trace.rank}}
    numbers = {name: number for number, name in trace.tracks.items()}
    for number, name in trace.tracks.items():
        yield {"name": "thread_name", "ph": "M", "pid": trace.rank, "tid": number, "args": {"name": name}}
    yield from trace.others
    for each in trace.operations:
        place = {"ph": "X", "pid": trace.rank, "tid": numbers[each.track]}
        if each.asked is not None:
            yield {"name": NEGOTIATE, "ts": each.asked / 1e3, "dur": each.waited / 1e3, **place}
        if each.queued:
            yield {"name": QUEUE, "ts": (each.begin - each.queued) / 1e3, "dur": each.queued / 1e3, **place}
        args = {"tensor": each.tensor, "bytes": each.bytes}
        if each.algorithm:
            args |= {"algorithm": each.algorithm}
        yield {"name": each.kind, "ts": each.begin / 1e3, "dur": (each.end - each.begin) / 1e3, **place, "args": args}
