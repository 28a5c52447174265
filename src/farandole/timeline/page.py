"""Self-contained HTML page about a job's timelines."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from farandole.timeline.clocks import Clock
from farandole.timeline.figures import Figures, KindFigures, RankFigures, TensorFigures, count_figures
from farandole.timeline.looks import SCRIPT, STYLE
from farandole.timeline.trace import RankTrace
from farandole.topology import host_name

__all__ = ["spell_bytes", "spell_time", "write_page"]

PARTS = 480  # into which a strip divides the job's time
STRIP_HEIGHT = 28
MOST_TENSORS = 100
TICKS = 6


def write_page(ranks: Mapping[int, RankTrace], clocks: Sequence[Clock], warnings: Sequence[str]) -> Iterator[str]:
    """Yield the page about `ranks`, whose times `clocks` have put on one clock."""
    figures = count_figures(ranks, PARTS)
    yield (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width"><title>farandole timeline</title>\n'
        f"<style>{STYLE}</style></head><body>\n<h1>farandole timeline</h1>\n"
    )
    yield from _notes(clocks, warnings)
    if not any(rank.operations for rank in figures.ranks):
        yield "<p>The timelines show no operation.</p>\n</body></html>\n"
        return
    yield from _summary(figures)
    yield from _strips(figures)
    yield from _ranks(figures)
    yield from _buckets(figures)
    yield from _tensors(figures.tensors)
    yield f"<script>{SCRIPT}</script></body></html>\n"


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


def _notes(clocks: Sequence[Clock], warnings: Sequence[str]) -> Iterator[str]:
    for warning in warnings:
        yield f'<p class="warning">{escape(warning)}</p>\n'
    if len(clocks) > 1:
        yield "<details><summary>Clocks</summary><ul>"
        yield from (f"<li>{escape(str(clock))}</li>" for clock in clocks)
        yield "</ul></details>\n"


def _summary(figures: Figures) -> Iterator[str]:
    walls = sum(rank.wall for rank in figures.ranks)
    operations = sum(kind.operations for kind in figures.kinds)
    buckets = sum(kind.buckets for kind in figures.kinds)
    tiles = [
        (spell_time(figures.end - figures.begin), "from the first request to the last end", "wall"),
        (
            _spell_share(sum(rank.busy for rank in figures.ranks), walls),
            "of it with an operation under way",
            "busy",
        ),
        (
            _spell_share(sum(rank.waiting for rank in figures.ranks), walls),
            "of it waiting: no operation under way, but one requested that others had not",
            "waiting",
        ),
        (f"{operations / buckets:.2f}", "operations in a bucket, on average", "fill"),
    ]
    yield '<div class="tiles">'
    for value, what, name in tiles:
        yield f'<div class="tile {name}"><b>{value}</b>{what}</div>'
    yield "</div>\n"
    slowest = figures.slowest
    if slowest is not None:
        yield (
            f'<p class="verdict">Rank {slowest.rank} held up the others most: each of them waited '
            f"{spell_time(slowest.held_up)} for it, on average. It was the last to ask in {slowest.came_last:,} of "
            f"{figures.meetings:,} operations.</p>\n"
        )


def _strips(figures: Figures) -> Iterator[str]:
    yield (
        "<h2>Over time</h2>\n<p>For each rank, the share of each moment in which an operation was "
        '<span class="key busy">under way</span>, or none was, but the rank was '
        '<span class="key waiting">waiting</span>: it had requested an operation that others had not. A rank that '
        "requests ahead, as an optimizer does during the backward pass, computes meanwhile. In the rest of the time "
        "farandole had no work.</p>\n"
        '<div class="strips">'
    )
    for rank in figures.ranks:
        both = [min(1.0, a + b) for a, b in zip(rank.busy_over_time, rank.waiting_over_time, strict=True)]
        yield (
            f'<span>rank {rank.rank}</span><svg viewBox="0 0 {PARTS} {STRIP_HEIGHT}" preserveAspectRatio="none" '
            f'role="img" aria-label="rank {rank.rank} over time">'
            f'<path class="waiting" d="{_area(both)}"/><path class="busy" d="{_area(rank.busy_over_time)}"/></svg>'
        )
    ticks = (spell_time((figures.end - figures.begin) * tick / (TICKS - 1)) for tick in range(TICKS))
    yield f'<span></span><div class="ticks">{"".join(f"<span>{tick}</span>" for tick in ticks)}</div></div>\n'


def _area(heights: Sequence[float]) -> str:
    steps = "".join(f"V{STRIP_HEIGHT * (1 - height):.3g}H{at}" for at, height in enumerate(heights, 1))
    return f"M0 {STRIP_HEIGHT}{steps}V{STRIP_HEIGHT}Z"


def _ranks(figures: Figures) -> Iterator[str]:
    yield (
        "<h2>Ranks</h2>\n<p>The rank that asks last makes the others wait. The slow rank waits little, and the others "
        "wait for it.</p>\n"
    )
    slowest = figures.slowest
    yield from _table(
        "ranks",
        [
            "rank",
            "host",
            "time",
            "under way",
            "waiting",
            "neither",
            "",
            "operations",
            "data",
            "asked last",
            "held up others",
        ],
        (
            _rank_row(rank, figures.meetings, slowest is not None and rank.rank == slowest.rank)
            for rank in figures.ranks
        ),
    )


def _rank_row(rank: RankFigures, meetings: int, is_slowest: bool) -> str:
    neither = rank.wall - rank.busy - rank.waiting
    shares = (
        (name, 100 * part / rank.wall if rank.wall else 0)
        for name, part in (("busy", rank.busy), ("waiting", rank.waiting))
    )
    bar = "".join(f'<i class="{name}" style="width:{share:.2f}%"></i>' for name, share in shares)
    cells = [
        _cell(rank.rank, str(rank.rank)),
        _text_cell("-" if rank.host is None else host_name(rank.host)),
        _cell(rank.wall, spell_time(rank.wall)),
        _cell(rank.busy, _spell_share(rank.busy, rank.wall)),
        _cell(rank.waiting, _spell_share(rank.waiting, rank.wall)),
        _cell(neither, _spell_share(neither, rank.wall)),
        f'<td class="bar"><div>{bar}</div></td>',
        _cell(rank.operations, _spell_count(rank.operations)),
        _cell(rank.bytes, spell_bytes(rank.bytes)),
        _cell(rank.came_last, f"{_spell_count(rank.came_last)} ({_spell_share(rank.came_last, meetings)})"),
        _cell(rank.held_up, spell_time(rank.held_up)),
    ]
    return f"<tr{' class=slowest' if is_slowest else ''}>{''.join(cells)}</tr>\n"


def _buckets(figures: Figures) -> Iterator[str]:
    yield (
        "<h2>Buckets</h2>\n<p>Operations that are ready together run as one bucket; its bytes and the world determine "
        "the algorithm. Counted on all ranks; operations that ran together on one rank are one bucket.</p>\n"
    )
    counted = ["buckets", "operations", "in a bucket", "at most", "data in a bucket", "time of a bucket", "speed"]
    yield from _table("kinds", ["kind", "algorithm", *counted], map(_kind_row, figures.kinds))
    classes: dict[int, int] = {}
    for fill, count in figures.fills.items():
        lowest = 1 << (fill.bit_length() - 1)
        classes[lowest] = classes.get(lowest, 0) + count
    most, total = max(classes.values()), sum(classes.values())
    yield '<div class="fills">'
    for lowest, count in sorted(classes.items()):
        label = "1 operation" if lowest == 1 else f"{lowest} to {2 * lowest - 1} operations"
        yield (
            f'<span>{label}</span><div><i class="busy" style="width:{100 * count / most:.2f}%"></i></div>'
            f"<span>{_spell_count(count)} buckets, {_spell_share(count, total)}</span>"
        )
    yield "</div>\n"


def _kind_row(kind: KindFigures) -> str:
    speed = kind.bytes / kind.busy * 1e9 if kind.busy else 0
    cells = [
        _text_cell(kind.kind),
        _text_cell(kind.algorithm or "-"),
        _cell(kind.buckets, _spell_count(kind.buckets)),
        _cell(kind.operations, _spell_count(kind.operations)),
        _cell(kind.operations / kind.buckets, f"{kind.operations / kind.buckets:.2f}"),
        _cell(kind.most, _spell_count(kind.most)),
        _cell(kind.bytes / kind.buckets, spell_bytes(kind.bytes / kind.buckets)),
        _cell(kind.busy / kind.buckets, spell_time(kind.busy / kind.buckets)),
        _cell(speed, f"{spell_bytes(speed)}/s" if speed else "-"),
    ]
    return f"<tr>{''.join(cells)}</tr>\n"


def _tensors(tensors: Sequence[TensorFigures]) -> Iterator[str]:
    yield (
        "<h2>Tensors</h2>\n<p>On an average rank. The time of a bucket is divided among its tensors by bytes; "
        "waiting is from a rank's request until all ranks have asked and the bucket begins, and overlaps between "
        "tensors.</p>\n"
    )
    total = sum(each.busy for each in tensors)
    shown, others = tensors[:MOST_TENSORS], tensors[MOST_TENSORS:]
    rows = [_tensor_row(each, total) for each in shown]
    if others:
        sums = [sum(getattr(each, what) for each in others) for what in ("operations", "bytes", "busy", "waited")]
        rows.append(_tensor_row(TensorFigures(f"{len(others):,} others", "", *sums), total))
    heads = ["tensor", "kind", "time", "share", "time of one", "data", "data of one", "operations", "waiting of one"]
    yield from _table("tensors", heads, rows)


def _tensor_row(tensor: TensorFigures, total: float) -> str:
    count = tensor.operations
    cells = [
        _text_cell(tensor.name),
        _text_cell(tensor.kind),
        _cell(tensor.busy, spell_time(tensor.busy)),
        _cell(tensor.busy, _spell_share(tensor.busy, total)),
        _cell(tensor.busy / count, spell_time(tensor.busy / count)),
        _cell(tensor.bytes, spell_bytes(tensor.bytes)),
        _cell(tensor.bytes / count, spell_bytes(tensor.bytes / count)),
        _cell(count, _spell_count(count)),
        _cell(tensor.waited / count, spell_time(tensor.waited / count)),
    ]
    return f"<tr>{''.join(cells)}</tr>\n"


def _table(name: str, heads: Iterable[str], rows: Iterable[str]) -> Iterator[str]:
    top = "".join(f"<th>{head}</th>" for head in heads)
    yield f'<div class="wide"><table id="{name}"><thead><tr>{top}</tr></thead><tbody>\n'
    yield from rows
    yield "</tbody></table></div>\n"


def _cell(value: float, text: str) -> str:
    return f'<td data-value="{value:.17g}">{text}</td>'


def _text_cell(text: str) -> str:
    return f'<td class="text">{escape(text)}</td>'
