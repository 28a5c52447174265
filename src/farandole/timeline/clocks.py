"""Comparison of the clocks of several hosts, and correction of the times of their ranks.

Each host's steady clock counts from its own start. An operation that no rank can finish before every rank has begun it
ends on all ranks at nearly the same time, so the median of the differences of these ends is the difference of the
clocks. If all such operations overlap as they are, the hosts may share a clock, and a difference is only a late end."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from farandole.errors import spell_ranks
from farandole.timeline.meetings import UNMET, find_meetings, spread_of
from farandole.timeline.trace import RankTrace
from farandole.topology import host_name

ONE_CLOCK = 1_000_000  # ns: ranks that see an operation end so close together need no correction


@dataclass(frozen=True, slots=True)
class Clock:
    """The offset of a clock that some ranks share from the first rank's clock, in nanoseconds."""

    host: str | None
    ranks: tuple[int, ...]
    ahead: int
    spread: int  # half of the differences are closer to `ahead` than this
    meetings: int  # how many differences there were; 0: the clock is unknown, and `ahead` 0
    overlapping: bool = True  # no operation ended on these ranks before the first rank began it, nor the other way
    reference: bool = False

    @property
    def shift(self) -> int:
        """Return the nanoseconds to subtract from the times of the ranks.

        This is `ahead` if it exceeds its spread and a shared clock cannot explain it, else 0.
        """
        return self.ahead if not self.overlapping and abs(self.ahead) > max(ONE_CLOCK, self.spread) else 0

    def __str__(self) -> str:
        whose = f"the clock of {spell_ranks(self.ranks)}" + (f" (host {host_name(self.host)})" if self.host else "")
        if self.reference:
            return f"{whose}: the reference for all times"
        if not self.meetings:
            return f"{whose}: not compared, because it shows no operation with the first rank; its times are unchanged"
        what = f"{abs(self.ahead) / 1e6:,.3f} ms {'ahead' if self.ahead >= 0 else 'behind'}"
        done = "shifted" if self.shift else "not shifted"
        return f"{whose}: {what}, give or take {self.spread / 1e6:.3f} ms in {self.meetings:,} operations; {done}"


def compare_clocks(ranks: Mapping[int, RankTrace]) -> list[Clock]:
    """Compare the clocks of hosts with that of the first rank that has operations; ranks of one host share a clock.

    A rank without the name of its host counts as a host of its own."""
    hosts: dict[str | int, list[int]] = defaultdict(list)
    for rank, trace in sorted(ranks.items()):
        hosts[rank if trace.host is None else trace.host].append(rank)
    first = next((rank for rank, trace in sorted(ranks.items()) if trace.operations), None)
    found: dict[int, list[int]] = defaultdict(list)  # by rank: how much later than the first its operations end
    apart: set[int] = set()  # ranks that cannot have the first one's clock
    for meeting in find_meetings(ranks):
        if first in meeting and meeting[first].kind not in UNMET:
            begin, end = meeting[first].begin, meeting[first].end
            for rank, operation in meeting.items():
                found[rank].append(operation.end - end)
                if operation.end < begin or end < operation.begin:
                    apart.add(rank)
    clocks = []
    for host, members in hosts.items():
        name = host if isinstance(host, str) else None
        if first in members:
            clocks.append(Clock(name, tuple(members), 0, 0, 0, reference=True))
            continue
        later = [difference for rank in members for difference in found[rank]]
        ahead = round(median(later)) if later else 0
        clocks.append(Clock(name, tuple(members), ahead, spread_of(later), len(later), apart.isdisjoint(members)))
    return clocks


def shift_traces(ranks: Mapping[int, RankTrace], clocks: Iterable[Clock]) -> dict[int, RankTrace]:
    """Put all times on the clock of the first rank, by the shifts of `clocks`."""
    shifts = {rank: clock.shift for clock in clocks for rank in clock.ranks}
    return {rank: trace.shifted(-shifts[rank]) for rank, trace in ranks.items()}
