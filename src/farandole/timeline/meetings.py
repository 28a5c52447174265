"""Matching of the operations of several ranks: the same operation on all of them is a meeting."""

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from farandole.timeline.trace import Operation, RankTrace

# Kinds that may end on a rank before every rank has begun: the root of a broadcast need not wait. A rank that joins
# begins long before the last one. Operations of the other kinds end on no rank before every rank has begun.
UNMET = ("broadcast", "join")

_Key = tuple[str, str]  # track and kind


def find_meetings(ranks: Mapping[int, RankTrace]) -> list[dict[int, Operation]]:
    """Return each operation as a mapping from the ranks whose timelines show it.

    The n-th operation of one name and kind is the same on all ranks. A rank that shows fewer of them than the first
    rank lacks the last ones (it was killed) or the first ones (its timeline began later), whichever fits better."""
    by_rank = {rank: _by_key(trace) for rank, trace in sorted(ranks.items())}
    first = next((each for each in by_rank.values() if each), {})
    meetings: dict[tuple[_Key, int], dict[int, Operation]] = defaultdict(dict)
    for rank, shown in by_rank.items():
        back = _lacks_first(first, shown)
        for key, operations in shown.items():
            skipped = len(first.get(key, operations)) - len(operations) if back else 0
            for number, operation in enumerate(operations, skipped):
                meetings[key, number][rank] = operation
    return list(meetings.values())


def spread_of(differences: list[int]) -> int:
    """Return the median distance from the median; 0 for an empty list."""
    if not differences:
        return 0
    middle = median(differences)
    return round(median(abs(each - middle) for each in differences))


def _by_key(trace: RankTrace) -> dict[_Key, list[Operation]]:
    shown: dict[_Key, list[Operation]] = defaultdict(list)
    for operation in trace.operations:
        shown[operation.track, operation.kind].append(operation)
    return shown


def _lacks_first(one: Mapping[_Key, list[Operation]], other: Mapping[_Key, list[Operation]]) -> bool:
    both = [(one[key], other[key]) for key in one if key in other and key[1] not in UNMET]
    from_front = [b.end - a.end for ours, theirs in both for a, b in zip(ours, theirs, strict=False)]
    from_back = [b.end - a.end for ours, theirs in both for a, b in zip(ours[::-1], theirs[::-1], strict=False)]
    return spread_of(from_back) < spread_of(from_front)
