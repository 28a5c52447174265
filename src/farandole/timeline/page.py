"""Self-contained HTML page about a job's timelines, from the template `page.html`."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TypeAlias

from farandole.timeline.clocks import Clock
from farandole.timeline.figures import Figures, KindFigures, RankFigures, TensorFigures, count_figures
from farandole.timeline.trace import RankTrace
from farandole.topology import host_name

PARTS = 480  # into which a strip divides the job's time
STRIP_HEIGHT = 28
MOST_TENSORS = 100
TICKS = 6


class _Html(str):
    """A cell that is HTML already."""

    __slots__ = ()


Cell: TypeAlias = str | tuple[float, str]  # a text, or a number and how it is spelled


def write_page(ranks: Mapping[int, RankTrace], clocks: Sequence[Clock], warnings: Sequence[str]) -> Iterator[str]:
    """Yield the page about `ranks`, whose times `clocks` have put on one clock."""
    figures = count_figures(ranks, PARTS)
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    head, body = map(Template, text.split("<!-- figures -->"))
    notes = "".join(f'<p class="warning">{escape(warning)}</p>\n' for warning in warnings)
    if len(clocks) > 1:
        items = "".join(f"<li>{escape(str(clock))}</li>" for clock in clocks)
        notes += f"<details><summary>Clocks</summary><ul>{items}</ul></details>\n"
    yield head.substitute(notes=notes)
    if any(rank.operations for rank in figures.ranks):
        yield body.substitute(_summary(figures), **_tables(figures))
    else:
        yield "<p>The timelines show no operation.</p>\n</body></html>\n"


def spell_time(nanoseconds: float) -> str:
    """Spell a time with three digits and its unit."""
    if nanoseconds >= 120e9:
        minutes, seconds = divmod(round(nanoseconds / 1e9), 60)
        return f"{minutes} min {seconds} s"
    if round(nanoseconds) == 0:
        return "0 s"
    for factor, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if nanoseconds >= factor:
            return f"{_three_digits(nanoseconds / factor)} {unit}"
    return f"{round(nanoseconds)} ns"


def spell_bytes(count: float) -> str:
    """Spell a number of bytes with three digits and its unit."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{_three_digits(count / 1024**power)} {unit}"
    return f"{round(count)} B"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _spell_count(count: float) -> str:
    return f"{count:,.0f}" if count >= 100 or count == round(count) else f"{count:.3g}"


def _spell_share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _summary(figures: Figures) -> dict[str, str]:
    walls = sum(rank.wall for rank in figures.ranks)
    slowest = figures.slowest
    ticks = (spell_time((figures.end - figures.begin) * tick / (TICKS - 1)) for tick in range(TICKS))
    verdict = ""
    if slowest is not None:
        verdict = (
            f'<p class="verdict">Rank {slowest.rank} held up the others most: each of them waited '
            f"{spell_time(slowest.held_up)} for it, on average. It was the last to ask in {slowest.came_last:,} of "
            f"{figures.meetings:,} operations.</p>\n"
        )
    return {
        "wall": spell_time(figures.end - figures.begin),
        "busy": _spell_share(sum(rank.busy for rank in figures.ranks), walls),
        "waiting": _spell_share(sum(rank.waiting for rank in figures.ranks), walls),
        "fill": f"{sum(k.operations for k in figures.kinds) / sum(k.buckets for k in figures.kinds):.2f}",
        "verdict": verdict,
        "ticks": "".join(f"<span>{tick}</span>" for tick in ticks),
    }


def _tables(figures: Figures) -> dict[str, str]:
    total = sum(each.busy for each in figures.tensors)
    shown, others = figures.tensors[:MOST_TENSORS], figures.tensors[MOST_TENSORS:]
    if others:
        sums = [sum(getattr(each, what) for each in others) for what in ("operations", "bytes", "busy", "waited")]
        shown = [*shown, TensorFigures(f"{len(others):,} others", "", *sums)]
    return {
        "strips": "".join(map(_strip, figures.ranks)),
        "ranks": "".join(_rank_row(rank, figures) for rank in figures.ranks),
        "kinds": "".join(map(_kind_row, figures.kinds)),
        "fills": _fills(figures.fills),
        "tensors": "".join(_tensor_row(each, total) for each in shown),
    }


def _strip(rank: RankFigures) -> str:
    both = [min(1.0, a + b) for a, b in zip(rank.busy_over_time, rank.waiting_over_time, strict=True)]
    return (
        f'<span>rank {rank.rank}</span><svg viewBox="0 0 {PARTS} {STRIP_HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="rank {rank.rank} over time">'
        f'<path class="waiting" d="{_area(both)}"/><path class="busy" d="{_area(rank.busy_over_time)}"/></svg>'
    )


def _area(heights: Sequence[float]) -> str:
    steps = "".join(f"V{STRIP_HEIGHT * (1 - height):.3g}H{at}" for at, height in enumerate(heights, 1))
    return f"M0 {STRIP_HEIGHT}{steps}V{STRIP_HEIGHT}Z"


def _rank_row(rank: RankFigures, figures: Figures) -> str:
    shares = {"busy": rank.busy, "waiting": rank.waiting}
    widths = {name: 100 * part / rank.wall if rank.wall else 0 for name, part in shares.items()}
    bar = "".join(f'<i class="{name}" style="width:{width:.2f}%"></i>' for name, width in widths.items())
    asked_last = f"{_spell_count(rank.came_last)} ({_spell_share(rank.came_last, figures.meetings)})"
    return _row(
        (rank.rank, str(rank.rank)),
        "-" if rank.host is None else host_name(rank.host),
        (rank.wall, spell_time(rank.wall)),
        *((part, _spell_share(part, rank.wall)) for part in (*shares.values(), rank.wall - sum(shares.values()))),
        _Html(f'<td class="bar"><div>{bar}</div></td>'),
        _count(rank.operations),
        (rank.bytes, spell_bytes(rank.bytes)),
        (rank.came_last, asked_last),
        (rank.held_up, spell_time(rank.held_up)),
        attribute=" class=slowest" if rank is figures.slowest else "",
    )


def _fills(fills: Mapping[int, int]) -> str:
    classes: dict[int, int] = {}
    for fill, count in fills.items():
        lowest = 1 << (fill.bit_length() - 1)
        classes[lowest] = classes.get(lowest, 0) + count
    most, total = max(classes.values()), sum(classes.values())
    return "".join(
        f"<span>{'1 operation' if lowest == 1 else f'{lowest} to {2 * lowest - 1} operations'}</span>"
        f'<div><i class="busy" style="width:{100 * count / most:.2f}%"></i></div>'
        f"<span>{_spell_count(count)} buckets, {_spell_share(count, total)}</span>"
        for lowest, count in sorted(classes.items())
    )


def _kind_row(kind: KindFigures) -> str:
    speed = kind.bytes / kind.busy * 1e9 if kind.busy else 0
    return _row(
        kind.kind,
        kind.algorithm or "-",
        _count(kind.buckets),
        _count(kind.operations),
        (kind.operations / kind.buckets, f"{kind.operations / kind.buckets:.2f}"),
        _count(kind.most),
        (kind.bytes / kind.buckets, spell_bytes(kind.bytes / kind.buckets)),
        (kind.busy / kind.buckets, spell_time(kind.busy / kind.buckets)),
        (speed, f"{spell_bytes(speed)}/s" if speed else "-"),
    )


def _tensor_row(tensor: TensorFigures, total: float) -> str:
    count = tensor.operations
    return _row(
        tensor.name,
        tensor.kind,
        (tensor.busy, spell_time(tensor.busy)),
        (tensor.busy, _spell_share(tensor.busy, total)),
        (tensor.busy / count, spell_time(tensor.busy / count)),
        (tensor.bytes, spell_bytes(tensor.bytes)),
        (tensor.bytes / count, spell_bytes(tensor.bytes / count)),
        _count(count),
        (tensor.waited / count, spell_time(tensor.waited / count)),
    )


def _count(count: float) -> Cell:
    return count, _spell_count(count)


def _row(*cells: Cell, attribute: str = "") -> str:
    return f"<tr{attribute}>{''.join(map(_cell, cells))}</tr>\n"


def _cell(cell: Cell) -> str:
    if isinstance(cell, _Html):
        return cell
    if isinstance(cell, str):
        return f'<td class="text">{escape(cell)}</td>'
    value, text = cell
    return f'<td data-value="{value:.17g}">{text}</td>'
