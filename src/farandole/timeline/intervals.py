"""Arithmetic with intervals of time, as lists of (begin, end)."""

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of `intervals`, ascending and without overlap or empty intervals."""
    covered: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if covered and begin <= covered[-1][1]:
            covered[-1] = covered[-1][0], max(end, covered[-1][1])
        else:
            covered.append((begin, end))
    return covered


def subtract(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the parts of `some` that `others` do not cover; both are results of `union`."""
    left: list[Interval] = []
    place = 0
    for begin, end in some:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            if others[at][0] > begin:
                left.append((begin, others[at][0]))
            begin = max(begin, others[at][1])
            at += 1
        if begin < end:
            left.append((begin, end))
    return left


def length(intervals: Iterable[Interval]) -> int:
    """Return the total length of `intervals`, which do not overlap."""
    return sum(end - begin for begin, end in intervals)


def shares(intervals: Sequence[Interval], begin: int, end: int, count: int) -> list[float]:
    """Divide begin..end into `count` equal parts; return the share of each part that `intervals`, of `union`, cover."""
    part = (end - begin) / count
    covered = [0.0] * count
    for start, stop in intervals if part > 0 else ():
        first = min(count - 1, int((start - begin) / part))
        last = min(count - 1, int((stop - begin) / part))
        for number in range(first, last + 1):
            edge = begin + number * part
            covered[number] += max(0.0, min(stop, edge + part) - max(start, edge)) / part
    return [min(1.0, each) for each in covered]
