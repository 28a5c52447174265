"""Figures computed from the timelines of a job's ranks. Times are nanoseconds."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from farandole.timeline.intervals import Interval, length, shares, subtract, union
from farandole.timeline.meetings import find_meetings
from farandole.timeline.trace import Operation, RankTrace


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Figures of one rank. At each moment of `wall` it is busy, waiting or neither."""

    rank: int
    host: str | None
    wall: int  # from the first request to the last end
    busy: int  # an operation was under way
    waiting: int  # none was, but this rank had requested one that other ranks had not
    operations: int
    bytes: int
    came_last: int  # the number of operations that no rank requested later
    held_up: int  # the time that each other rank waited for it, on average
    busy_over_time: list[float]  # for each part of the job's time, the busy share of it
    waiting_over_time: list[float]


@dataclass(frozen=True, slots=True)
class TensorFigures:
    """Figures of one tensor, on an average rank of those that show it."""

    name: str  # preceded by its process set
    kind: str
    operations: float
    bytes: float
    busy: float  # the time of its operations; a bucket's time is divided by bytes
    waited: float  # the time from its requests to the agreement of all ranks


@dataclass(frozen=True, slots=True)
class KindFigures:
    """Figures of the buckets of one kind of operation and one algorithm, of all ranks together."""

    kind: str
    algorithm: str
    buckets: int
    operations: int
    most: int  # operations in one bucket
    bytes: int
    busy: int


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures of a job, on one clock."""

    begin: int
    end: int
    meetings: int  # operations that at least two ranks show, all with their requests
    ranks: list[RankFigures]
    tensors: list[TensorFigures]  # the one with the most time first
    kinds: list[KindFigures]  # the one with the most time first
    fills: dict[int, int]  # by number of operations: how many buckets have it

    @property
    def slowest(self) -> RankFigures | None:
        """The rank for which the others waited longest."""
        late = [each for each in self.ranks if each.held_up]
        return max(late, key=lambda each: each.held_up) if late else None


def count_figures(ranks: Mapping[int, RankTrace], parts: int = 1) -> Figures:
    """Compute the figures of `ranks`, whose times are on one clock; `parts` divide the time of the job."""
    operations = [operation for trace in ranks.values() for operation in trace.operations]
    begin = min(map(_start, operations), default=0)
    end = max((operation.end for operation in operations), default=0)
    buckets = [bucket for trace in ranks.values() for bucket in _buckets(trace)]
    came_last, held_up, meetings = _count_lateness(ranks)
    of_ranks = []
    for rank, trace in sorted(ranks.items()):
        busy = union((each.begin, each.end) for each in trace.operations)
        waiting = subtract(union((_start(each), each.begin) for each in trace.operations), busy)
        started, ended = (
            min(map(_start, trace.operations), default=0),
            max((e.end for e in trace.operations), default=0),
        )
        of_ranks.append(
            RankFigures(
                rank=rank,
                host=trace.host,
                wall=ended - started,
                busy=length(busy),
                waiting=length(waiting),
                operations=len(trace.operations),
                bytes=sum(each.bytes for each in trace.operations),
                came_last=came_last[rank],
                held_up=held_up[rank],
                busy_over_time=shares(busy, begin, end, parts),
                waiting_over_time=shares(waiting, begin, end, parts),
            )
        )
    fills = dict(sorted(Counter(len(bucket) for bucket in buckets).items()))
    return Figures(begin, end, meetings, of_ranks, _count_tensors(ranks), _count_kinds(buckets), fills)


def _start(operation: Operation) -> int:
    return operation.begin if operation.asked is None else operation.asked


def _buckets(trace: RankTrace) -> Iterable[list[Operation]]:
    """Return the buckets of a rank: operations of one kind that begin and end together."""
    buckets: dict[tuple[str, int, int], list[Operation]] = defaultdict(list)
    for operation in trace.operations:
        buckets[operation.kind, operation.begin, operation.end].append(operation)
    return buckets.values()


def _count_lateness(ranks: Mapping[int, RankTrace]) -> tuple[Counter[int], Counter[int], int]:
    """Return how often each rank came last, how long each other rank waited for it, and the number of operations.

    The rank that waited least from its request to the agreement came last."""
    last: Counter[int] = Counter()
    waits: dict[tuple[int, int], list[Interval]] = defaultdict(list)  # by the awaited rank and the waiting rank
    count = 0
    for meeting in find_meetings(ranks):
        asked = {rank: each.asked for rank, each in meeting.items() if each.asked is not None}
        if len(asked) < max(2, len(meeting)):
            continue
        count += 1
        late = min(asked, key=lambda rank: meeting[rank].waited)
        last[late] += 1
        for rank, when in asked.items():
            if rank != late:
                waits[late, rank].append((when, when + meeting[rank].waited - meeting[late].waited))
    held_up: Counter[int] = Counter()
    for (late, _), intervals in waits.items():
        held_up[late] += length(union(intervals))
    return last, Counter({rank: time // max(1, len(ranks) - 1) for rank, time in held_up.items()}), count


def _count_tensors(ranks: Mapping[int, RankTrace]) -> list[TensorFigures]:
    shown: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for trace in ranks.values():
        seen = set()
        for bucket in _buckets(trace):
            size = sum(each.bytes for each in bucket)
            for each in bucket:
                share = each.bytes / size if size else 1 / len(bucket)
                tensor = shown[each.track, each.kind]
                seen.add((each.track, each.kind))
                added = (0, 1, each.bytes, share * (each.end - each.begin), each.waited)
                tensor[:] = [old + new for old, new in zip(tensor, added, strict=True)]
        for key in seen:
            shown[key][0] += 1
    tensors = [
        TensorFigures(name, kind, *(value / values[0] for value in values[1:]))
        for (name, kind), values in shown.items()
    ]
    return sorted(tensors, key=lambda each: (-each.busy, each.name))


def _count_kinds(buckets: Iterable[list[Operation]]) -> list[KindFigures]:
    by_kind: dict[tuple[str, str], list[list[Operation]]] = defaultdict(list)
    for bucket in buckets:
        by_kind[bucket[0].kind, bucket[0].algorithm].append(bucket)
    kinds = [
        KindFigures(
            kind=kind,
            algorithm=algorithm,
            buckets=len(some),
            operations=sum(map(len, some)),
            most=max(map(len, some)),
            bytes=sum(each.bytes for bucket in some for each in bucket),
            busy=sum(bucket[0].end - bucket[0].begin for bucket in some),
        )
        for (kind, algorithm), some in by_kind.items()
    ]
    return sorted(kinds, key=lambda each: (-each.busy, each.kind, each.algorithm))
