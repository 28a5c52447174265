"""Timeline in Horovod's form, for programs that read it: a process per tensor, and Horovod's names of events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count

from farandole.timeline.clocks import Clock
from farandole.timeline.meetings import find_meetings
from farandole.timeline.names import CYCLE, PLAN
from farandole.timeline.trace import Operation, RankTrace


def spell_as_horovod(ranks: Mapping[int, RankTrace], clocks: Sequence[Clock], warnings: Sequence[str]) -> Iterator[str]:
    """Yield the text of a trace with an event per line, in order of time, which begins at 0.

    Each operation is shown as the lowest rank saw it: NEGOTIATE_ALLREDUCE with a tick for the request of each rank,
    then ALLREDUCE, within which QUEUE is the wait for other operations."""
    meetings = sorted(find_meetings(ranks), key=lambda each: _shown(each).begin)
    numbers: dict[str, int] = {}
    free: dict[int, int] = {}  # by tensor: the end of its events so far
    events = [_marker(each) for trace in list(ranks.values())[:1] for each in trace.others if each["name"] == PLAN]
    for meeting in meetings:
        pid = numbers.setdefault(_shown(meeting).track, len(numbers) + 1)
        shown = list(_operation(meeting, pid, free.get(pid)))
        free[pid] = shown[-1][0]
        events += shown
    order = count()  # events of one moment stay in their order
    timed = sorted((time, next(order), event) for time, event in events)
    begin = timed[0][0] if timed else 0
    yield "[\n"
    comma = ""
    for pid, name in [(0, ""), *((number, name) for name, number in numbers.items())]:
        named = {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
        yield comma + json.dumps(named)
        yield ",\n" + json.dumps({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
        comma = ",\n"
    for time, _, event in timed:
        yield ",\n" + json.dumps({**event, "ts": (time - begin) // 1000})
    yield "\n]\n"


def _shown(meeting: Mapping[int, Operation]) -> Operation:
    return meeting[min(meeting)]


def _marker(mark: Mapping[str, object]) -> tuple[int, dict[str, object]]:
    time = mark["ts"]
    assert isinstance(time, (int, float))
    return round(time * 1e3), {"ph": "i", "name": CYCLE, "s": "g"}


def _operation(meeting: Mapping[int, Operation], pid: int, free: int | None) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the times and events of an operation, none before `free`, so that pairs of B and E events nest."""
    shown = _shown(meeting)
    kind = shown.kind.upper()
    asked = sorted((operation.asked, rank) for rank, operation in meeting.items() if operation.asked is not None)
    # A rank may request a tensor again before another rank has ended, and the comparison of clocks has an error.
    least = free if free is not None else asked[0][0] if asked else shown.begin - shown.queued
    agreed = max(least, shown.begin - shown.queued)
    begin, end = max(agreed, shown.begin), max(agreed, shown.end)
    if asked:
        ticks = [(min(max(time, least), agreed), rank) for time, rank in asked]
        yield ticks[0][0], {"ph": "B", "name": f"NEGOTIATE_{kind}", "pid": pid}
        for time, rank in ticks:
            yield time, {"ph": "X", "name": str(rank), "pid": pid, "dur": 0}
        yield agreed, {"ph": "E", "pid": pid}
    yield agreed, {"ph": "B", "name": kind, "pid": pid}
    if shown.queued:
        yield agreed, {"ph": "B", "name": "QUEUE", "pid": pid}
        yield begin, {"ph": "E", "pid": pid}
    args = {"bytes": shown.bytes} | ({"algorithm": shown.algorithm} if shown.algorithm else {})
    yield end, {"ph": "E", "pid": pid, "args": args}
