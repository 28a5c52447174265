"""Puts ranks of several hosts on one clock.

Each host's steady clock counts from its own start. What no rank can finish before every rank has come ends on all ranks
at nearly the same time, so the median of the differences of these ends is the difference of the clocks."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from farandole.timeline.trace import RankTrace

__all__ = ["Clock", "compare_clocks"]

# A broadcast's root need not wait for anybody, and who joins waits for the last one.
MEETINGS = ("allreduce", "allgather", "alltoall", "barrier", "reducescatter")
ONE_CLOCK = 1_000_000  # ns: ranks that see an operation end so close together need no correction


@dataclass(frozen=True, slots=True)
class Clock:
    """What the clock that some ranks share shows beyond that of the first rank, in nanoseconds."""

    host: str | None
    ranks: tuple[int, ...]
    ahead: int
    spread: int  # half of the differences are closer to `ahead` than this
    meetings: int  # how many differences there were; 0: the clock is unknown, and `ahead` 0
    reference: bool = False

    @property
    def shift(self) -> int:
        """What to subtract from the times of the ranks: `ahead` where it is sure and not explained by one clock."""
        return self.ahead if abs(self.ahead) > max(ONE_CLOCK, self.spread) else 0

    def __str__(self) -> str:
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        whose = f"the clock of {ranks}" + (f" (host {self.host})" if self.host else "")
        if self.reference:
            return f"{whose}: all times are in it"
        if not self.meetings:
            return f"{whose}: not compared, for it shows no operation with the first rank; its times are as they stood"
        what = f"{abs(self.ahead) / 1e6:.3f} ms {'ahead' if self.ahead >= 0 else 'behind'}"
        done = "shifted" if self.shift else "not shifted"
        return f"{whose}: {what}, give or take {self.spread / 1e6:.3f} ms in {self.meetings} operations; {done}"


def compare_clocks(ranks: Mapping[int, RankTrace]) -> list[Clock]:
    """Compare the clocks of hosts with that of the first rank that did anything; ranks of one host share a clock.

    A rank that does not say its host counts as a host of its own."""
    hosts: dict[str | int, list[int]] = defaultdict(list)
    for rank, trace in sorted(ranks.items()):
        hosts[rank if trace.host is None else trace.host].append(rank)
    first = next((rank for rank, trace in sorted(ranks.items()) if _ends(trace)), None)
    clocks = []
    for host, members in hosts.items():
        name = host if isinstance(host, str) else None
        if first is None or first in members:
            clocks.append(Clock(name, tuple(members), 0, 0, 0, reference=first is not None))
            continue
        found = [difference for rank in members for difference in _differences(ranks[first], ranks[rank])]
        ahead = round(median(found)) if found else 0
        clocks.append(Clock(name, tuple(members), ahead, _spread(found), len(found)))
    return clocks


def _differences(one: RankTrace, other: RankTrace) -> list[int]:
    """Give by how much operations end later on the clock of `other`."""
    mine, theirs = _ends(one), _ends(other)
    both = [(mine[what], theirs[what]) for what in mine if what in theirs]
    # One of the two may lack the last turns (it was killed) or the first ones (it started its timeline later).
    from_front = [b - a for one_ends, ends in both for a, b in zip(one_ends, ends, strict=False)]
    from_back = [b - a for one_ends, ends in both for a, b in zip(one_ends[::-1], ends[::-1], strict=False)]
    return min(from_front, from_back, key=_spread)


def _ends(trace: RankTrace) -> dict[tuple[str, str], list[int]]:
    ends: dict[tuple[str, str], list[int]] = defaultdict(list)
    for operation in trace.operations:
        if operation.kind in MEETINGS:
            ends[operation.track, operation.kind].append(operation.end)
    return ends


def _spread(differences: list[int]) -> int:
    if not differences:
        return 0
    middle = median(differences)
    return round(median(abs(each - middle) for each in differences))
