"""Comparisons of contenders as lines of a table: farandole's time, the other's, their ratio and its target."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from race import Race, Spread, spread

OURS = "farandole"
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison: the median of `ratio` (the other's time divided by ours) must be at least `must`, if set."""

    what: str
    against: str
    ours: Spread
    theirs: Spread | None
    ratio: Spread
    must: float | None = None

    @property
    def verdict(self) -> str:
        if self.must is None:
            return ""
        return "met" if self.ratio.median >= self.must else "MISSED"


def compare(what: str, race: Race, musts: Mapping[str, float]) -> list[Line]:
    """Return the lines of one race; `musts` are the least ratios, by contender."""
    micro = {name: spread([1e6 * value for value in seconds]) for name, seconds in race.seconds.items()}
    return [
        Line(what, name, micro[OURS], micro[name], spread(ratios), musts.get(name))
        for name, ratios in race.ratios(OURS).items()
    ]


def limit(what: str, race: Race, microseconds: float) -> Line:
    """Return the line of an absolute limit on our time."""
    ours = [1e6 * value for value in race.seconds[OURS]]
    shares = spread([microseconds / value for value in ours])
    return Line(what, f"limit {microseconds:g} us", spread(ours), None, shares, 1.0)


def table(title: str, lines: Sequence[Line]) -> str:
    """Return the lines as a text table; times are medians of the rounds, in microseconds."""
    head = ("what", "against", "ours us", "theirs us", "theirs : ours (min / median / max)", "must", "")
    rows = [
        (
            line.what,
            line.against,
            _short(line.ours.median),
            "" if line.theirs is None else _short(line.theirs.median),
            " / ".join(_short(value) for value in (line.ratio.min, line.ratio.median, line.ratio.max)),
            "" if line.must is None else f">= {line.must:g}",
            line.verdict,
        )
        for line in lines
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    edges = "<<>>>>>"
    text = [
        "  ".join(f"{cell:{edge}{width}}" for cell, edge, width in zip(row, edges, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
    return "\n".join([title, *text])


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def size_text(size: int) -> str:
    """Return a number of bytes as text: 4 B, 64 KiB, 16 MiB."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def bytes_of(title: str) -> int:
    """Return the bytes that a title names in the form of `size_text`; 0 if it names none."""
    units = {"B": 1, "KiB": KIB, "MiB": MIB}
    found = re.search(r"(\d+) (B|KiB|MiB)", title)
    return int(found[1]) * units[found[2]] if found else 0
