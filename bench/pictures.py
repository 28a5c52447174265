"""Pictures of measurements, and the page of the documents that shows them.

    python bench/pictures.py RESULT.json...

Draws each result of `record` that has comparisons as docs/reference/performance/NAME.svg, in place of an earlier one of
the same benchmark, and writes docs/reference/performance.md, which shows all pictures of that folder."""

import json
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from comparison import Line
from summary import line_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "performance.md"
FOLDER = PAGE.with_suffix("")
COLORS = (
    *("#b3402a", "#3b78b3", "#2e9e8f", "#c98a1b", "#8a5bb5", "#6a8f2b"),
    *("#777", "#222", "#e377c2", "#17becf", "#8c564b", "#bcbd22"),
)
WIDTH, ROW, EDGE = 960, 20, 40  # pixels
FONT = 'font-family="sans-serif" font-size="12"'
LETTER = 6.2  # pixels, about, at the font's size
HEAD = """# Performance

Each picture shows one benchmark: the other's time divided by farandole's, so right of 1 farandole is faster. The dot
is the median of the rounds, the line reaches from the least to the greatest ratio. The title names the script in
`bench/`, the machine and the versions. [Benchmarks](benchmarks.md) says what each script measures and how.
`make bench ONLY=allreduce` measures on your machine and draws that picture anew.
"""


def draw(result: Mapping[str, object], lines: Sequence[Line]) -> str:
    """Return the SVG of one result: a row for each measurement, a color for each competitor."""
    rows = list(dict.fromkeys(line.what for line in lines))
    peers = list(dict.fromkeys(line.against for line in lines))
    left = EDGE + LETTER * max(map(len, rows))
    said = textwrap.wrap(_conditions(result), int((WIDTH - EDGE) / LETTER))
    keys, top = _keys(peers, 36 + 16 * len(said))
    bottom = top + ROW * (len(rows) + 1)
    low = min(1.0, *(line.ratio.min for line in lines))
    high = max(1.0, *(line.ratio.max for line in lines))
    ends = math.floor(math.log10(low) * 3) / 3, max(math.ceil(math.log10(high) * 3) / 3, 1 / 3)

    def x(ratio: float) -> float:
        return left + (math.log10(ratio) - ends[0]) / (ends[1] - ends[0]) * (WIDTH - EDGE - left)

    script, _, option = str(result["name"]).partition("-")
    name = f"bench/{script}.py --{option}" if option else f"bench/{script}.py"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 40}" {FONT}>',
        f'<rect width="{WIDTH}" height="{bottom + 40}" fill="#fff"/>',
        f'<text x="{EDGE / 2}" y="20" font-size="15">{escape(name)}: the other : farandole</text>',
        *(f'<text x="{EDGE / 2}" y="{38 + 16 * n}" fill="#555">{escape(each)}</text>' for n, each in enumerate(said)),
        *keys,
    ]
    for tick in _ticks(*ends):
        strong = "#222" if tick == 1 else "#ddd"
        parts.append(f'<path d="M{x(tick):.1f},{top}V{bottom}" stroke="{strong}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    colors = dict(zip(peers, _colors(peers), strict=True))
    for number, what in enumerate(rows):
        mine = [line for line in lines if line.what == what]
        y = top + ROW * (number + 1)
        parts.append(f'<text x="{left - 10:.0f}" y="{y + 4}" text-anchor="end">{escape(what)}</text>')
        for place_in_row, line in enumerate(mine):
            at, color = y + 3 * (place_in_row - (len(mine) - 1) / 2), colors[line.against]
            ratio = line.ratio
            parts.append(f'<path d="M{x(ratio.min):.1f},{at:.1f}H{x(ratio.max):.1f}" stroke="{color}"/>')
            parts.append(f'<circle cx="{x(ratio.median):.1f}" cy="{at:.1f}" r="3.5" fill="{color}"/>')
    return "\n".join([*parts, "</svg>", ""])


def _conditions(result: Mapping[str, object]) -> str:
    """Return machine and versions."""
    machine, packages = result["machine"], result["packages"]
    assert isinstance(machine, dict) and isinstance(packages, dict)
    there = [f"{name} {version}" for name, version in packages.items() if version != "not installed"]
    load = "{:.1f}".format(machine["load"][0])
    return (
        f"{machine['processor']}, {machine['cores']} cores, load {load}; Python {result['python']}, {', '.join(there)}"
    )


def _keys(peers: Sequence[str], y: int) -> tuple[list[str], int]:
    """Return the names of the competitors beside their colors, in lines from `y` on, and the height after these."""
    parts, x = [], EDGE / 2
    for peer, color in zip(peers, _colors(peers), strict=True):
        width = 30 + LETTER * len(peer)
        if x + width > WIDTH:
            x, y = EDGE / 2, y + 18
        parts.append(f'<circle cx="{x + 4:.0f}" cy="{y}" r="4" fill="{color}"/>')
        parts.append(f'<text x="{x + 12:.0f}" y="{y + 4}">{escape(peer)}</text>')
        x += width
    return parts, y + 14


def _colors(peers: Sequence[str]) -> list[str]:
    return [COLORS[number % len(COLORS)] for number in range(len(peers))]


def _ticks(low: float, high: float) -> list[float]:
    """Return round ratios between two powers of ten."""
    ratios = [digit * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for digit in (1, 2, 5)]
    return [ratio for ratio in ratios if low <= math.log10(ratio) <= high]


def page(pictures: Sequence[Path]) -> str:
    """Return the text of the page that shows these pictures."""
    shown = [f"## {path.stem}\n\n![Ratios of bench/{path.stem}.py](performance/{path.name})\n" for path in pictures]
    return "\n".join([HEAD, *shown])


def main(paths: Sequence[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for path in paths:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        lines = [line for line in map(line_of, result["lines"]) if line.theirs is not None]
        if lines:
            (FOLDER / f"{result['name']}.svg").write_text(draw(result, lines), encoding="utf-8")
    PAGE.write_text(page(sorted(FOLDER.glob("*.svg"))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
