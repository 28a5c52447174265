"""The page about a job's timelines: its numbers, against others' arithmetic; its text, against hostile names."""

import logging
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.launch import cli
from farandole.timeline.intervals import length, shares, subtract, union
from farandole.timeline.page import spell_bytes, spell_time
from helpers.traces import Op, write_trace

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The tables of a page by name, as rows of (value, text), and everything else that a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[tuple[float | None, str]]]] = defaultdict(list)
        self.tags: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.words = ""
        self._open: list[str] = []
        self._table = ""
        self.feed(text)
        self.close()
        assert self._open == [], "what is opened is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        given = dict(attrs)
        self.addresses += [value or "" for key, value in attrs if key in ("src", "href", "action", "data")]
        if tag not in VOID and tag != "path":
            self._open.append(tag)
        if tag == "table":
            self._table = given["id"] or ""
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag == "td":
            value = given.get("data-value")
            self.tables[self._table][-1].append((None if value is None else float(value), ""))

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data if self._open and self._open[-1] not in ("style", "script") else ""
        if "td" in self._open:
            value, text = self.tables[self._table][-1][-1]
            self.tables[self._table][-1][-1] = value, text + data

    def rows(self, table: str) -> list[list[float | str]]:
        """The rows of `table` without its heads: numbers where there are some, and else texts."""
        return [[text if value is None else value for value, text in row] for row in self.tables[table] if row]


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def report(folder: Path, ranks: list[list[Op]], **about: Any) -> Page:
    for rank, ops in enumerate(ranks):
        write_trace(folder / ("t.json" if rank == 0 else f"t.rank{rank}.json"), rank, ops, host="a#0f1e2d", **about)
    out = folder / "report.html"
    assert cli.main(["timeline", "report", str(folder / "t.json"), "-o", str(out)]) == 0
    return Page(out.read_text(encoding="utf-8"))


def made_up(size: int, steps: int, seed: int) -> list[list[Op]]:
    """Buckets of random operations one after the other; whole microseconds. Ranks see them at nearly the same time."""
    chance = random.Random(seed)
    ranks: list[list[Op]] = [[] for _ in range(size)]
    at = 1_000_000
    for step in range(steps):
        at += chance.randint(200, 5000)
        kind = chance.choice(["allreduce", "allreduce", "allgather"])
        names = chance.sample([f"{kind}.t{number}" for number in range(6)], chance.randint(1, 5))
        took, queued = chance.randint(50, 3000), chance.choice([0, 0, 30])
        algorithm = chance.choice(["", "lane", "shm slots"])
        for rank, ops in enumerate(ranks):
            begin = at + chance.randint(0, 20)
            # No two ranks wait equally long.
            asked = {name: begin - queued - chance.randint(1, 400) * size - rank for name in names}
            ops += [
                Op(name, asked[name], begin, begin + took, 100 * (step % 7), kind, "", queued, algorithm)
                for name in names
            ]
        at += took + 30
    return ranks


@pytest.mark.parametrize("seed", range(3))
def test_the_numbers_are_those_of_the_trace(seed: int, tmp_path: Path) -> None:
    ranks = made_up(3, 40, seed)
    page = report(tmp_path, ranks)
    # One cell for each microsecond says what a rank did in it.
    for rank, row in enumerate(page.rows("ranks")):
        ops = ranks[rank]
        start, end = min(op.asked or 0 for op in ops), max(op.end for op in ops)
        busy, waits = (np.zeros(int(end - start), bool) for _ in range(2))
        for op in ops:
            busy[int(op.begin - start) : int(op.end - start)] = True
            waits[int((op.asked or 0) - start) : int(op.begin - start)] = True
        neither, waiting = (~busy & ~waits).sum(), (waits & ~busy).sum()
        assert row[:2] == [rank, "a"]
        assert row[2:6] == [1000 * each for each in (end - start, busy.sum(), waiting, neither)]
        assert row[7:9] == [len(ops), sum(op.bytes for op in ops)]
    # The n-th operation of a name is the same on all ranks; made_up lists them in one order.
    last = Counter(
        int(np.argmin([op.begin - (op.asked or 0) for op in together])) for together in zip(*ranks, strict=True)
    )
    assert [row[9] for row in page.rows("ranks")] == [last[rank] for rank in range(3)]
    buckets = Counter((rank, op.kind, op.begin, op.algorithm) for rank, ops in enumerate(ranks) for op in ops)
    for kind, algorithm, *numbers in page.rows("kinds"):
        ran_by = "" if algorithm == "-" else algorithm
        fills = [count for (_, *each, by), count in buckets.items() if (each[0], by) == (kind, ran_by)]
        assert numbers[:4] == [len(fills), sum(fills), pytest.approx(np.mean(fills)), max(fills)]
        size = sum(op.bytes for ops in ranks for op in ops if (op.kind, op.algorithm) == (kind, ran_by))
        assert numbers[4] == pytest.approx(size / len(fills))
    rows = {row[0]: row[1:] for row in page.rows("tensors")}
    assert set(rows) == {op.tensor for ops in ranks for op in ops}
    for name, (kind, busy, _, _, size, _, count, waited) in rows.items():
        mine = [(rank, op) for rank, ops in enumerate(ranks) for op in ops if op.tensor == name]
        took = sum((op.end - op.begin) / buckets[rank, op.kind, op.begin, op.algorithm] for rank, op in mine)
        assert kind == mine[0][1].kind and count == len(mine) / 3
        assert busy == pytest.approx(1000 * took / 3)  # all tensors of a bucket have equally many bytes
        assert size == pytest.approx(sum(op.bytes for _, op in mine) / 3)
        assert waited == pytest.approx(1000 * np.mean([op.begin - op.queued - (op.asked or 0) for _, op in mine]))


def test_the_slow_rank_is_named(tmp_path: Path) -> None:
    # Ranks 0 and 2 wait 4 ms for rank 1 in each of 3 steps, for two tensors at once; rank 0 is late once, by 1 ms.
    ranks: list[list[Op]] = [[], [], []]
    for step in range(3):
        at = 10_000 + 10_000 * step
        for rank, ops in enumerate(ranks):
            asked = at + (4000 if rank == 1 else 0)
            ops += [Op(name, asked, at + 4010, at + 5000) for name in ("allreduce.a", "allreduce.b")]
    for rank, ops in enumerate(ranks):
        ops.append(Op("barrier", 50_000 + (1000 if rank == 0 else 0), 51_010, 51_100, 1, "barrier"))
    page = report(tmp_path, ranks)
    assert [(row[9], row[10]) for row in page.rows("ranks")] == [(1, 1e6), (6, 12e6), (0, 0)]
    assert "Rank 1 held up the others most: each of them waited 12.0 ms for it" in page.words
    assert "the last to ask in 6 of 7 operations" in page.words
    assert {row[1] for row in page.rows("ranks")} == {"a"} and "#0f1e2d" not in page.words


HOSTILE = "allreduce.</td><script>alert(1)</script><img src=x onerror='x'>&amp;\"\ud800"


def test_names_are_only_names_and_nothing_is_fetched(tmp_path: Path) -> None:
    ops = [Op(HOSTILE, 1000, 2000, 3000, set="set <b>one</b>: ")]
    page = report(tmp_path, [ops, ops], size=3)
    assert page.rows("tensors")[0][0] == f"set <b>one</b>: {HOSTILE[:-1]}?"
    assert (page.tags["script"], page.tags["b"], page.tags["img"]) == (1, 4, 0)  # the four tiles
    assert page.addresses == []
    text = (tmp_path / "report.html").read_text()
    assert "://" not in text and "@import" not in text and "url(" not in text
    assert "there were 3 ranks; no timeline here is that of rank 2" in page.words


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "cut off at line 1"), ("[]", "holds no event"), ('[{"name": "process_name", "ph": "M", "pid": 0}]', "")],
)
def test_a_trace_of_nothing(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    assert cli.main(["timeline", "report", str(tmp_path / "t.json"), "-o", str(tmp_path / "r")]) == 0
    words = Page((tmp_path / "r").read_text()).words
    assert "The timelines show no operation." in words and says in words


@pytest.mark.parametrize("asked", [None, 1000.0])
def test_one_rank_of_no_duration(asked: float | None, tmp_path: Path) -> None:
    page = report(tmp_path, [[Op("barrier", asked, 1000, 1000, 0, "barrier")]])
    assert page.rows("ranks") == [[0, "a", 0, 0, 0, 0, "", 1, 0, 0, 0]]
    assert "held up the others most" not in page.words


def test_the_cheap_ones_of_many_tensors_stand_in_one_row(tmp_path: Path) -> None:
    ops = [Op(f"allreduce.t{number}", 0, 10 * number, 10 * number + 1 + number) for number in range(130)]
    rows = report(tmp_path, [ops]).rows("tensors")
    assert len(rows) == 101 and rows[0][0] == "allreduce.t129"
    assert rows[-1][0] == "30 others" and rows[-1][2] == 1000 * sum(range(1, 31)) and rows[-1][7] == 30


def test_a_rank_whose_timeline_began_late_is_compared_with_the_right_ones(tmp_path: Path) -> None:
    ranks: list[list[Op]] = [[], []]
    for step in range(6):
        at = 10_000 * step + 700 * step * step
        for rank, ops in enumerate(ranks):
            ops.append(Op("allreduce.a", at + 1000 * rank, at + 1005, at + 1100))
    page = report(tmp_path, [ranks[0], ranks[1][2:]])
    assert [(row[9], row[10]) for row in page.rows("ranks")] == [(0, 0), (4, 4e6)]


def test_the_page_stands_beside_the_trace_unless_another_place_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trace, other = (write_trace(tmp_path / name, rank, []) for rank, name in enumerate(("t.json", "t.rank1.json")))
    for read, page in [([trace], "t.html"), ([other, trace], "t.rank1.html")]:
        assert cli.main(["timeline", "report", *map(str, read)]) == 0
        assert caplog.messages[-1] == f"wrote {tmp_path / page}"
    assert {each.name for each in tmp_path.iterdir()} == {"t.json", "t.rank1.json", "t.html", "t.rank1.html"}
    assert cli.main(["timeline", "report", str(trace.rename(tmp_path / "trace.html"))]) == 1
    assert "is one of the files to read; name another one" in caplog.messages[-1]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["timeline", "merge", str(other)])


STRETCHES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


@given(STRETCHES, STRETCHES, st.integers(1, 7))
def test_stretches_of_time(some: list[tuple[int, int]], others: list[tuple[int, int]], count: int) -> None:
    def cells(stretches: list[tuple[int, int]]) -> np.ndarray[Any, Any]:
        covered = np.zeros(60 * count, bool)  # a part is 60 cells, a moment is `count` cells
        for begin, end in stretches:
            covered[begin * count : end * count] = True
        return covered

    one, other = union(some), union(others)
    assert (cells(one) == cells(some)).all() and length(one) == cells(some).sum() / count
    assert all(end < begin for (_, end), (begin, _) in pairwise(one))
    left = subtract(one, other)
    assert (cells(left) == cells(some) & ~cells(others)).all() and length(left) == cells(left).sum() / count
    assert shares(one, 0, 60, count) == pytest.approx(cells(some).reshape(count, 60).mean(axis=1))


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0 s"),
        (999, "999 ns"),
        (1234, "1.23 µs"),
        (12_345_678, "12.3 ms"),
        (1.5e9, "1.50 s"),
        (3_725e9, "62 min 5 s"),
    ],
)
def test_times_are_spelled_with_units(nanoseconds: float, text: str) -> None:
    assert spell_time(nanoseconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 << 30, "3.00 GiB")])
def test_bytes_are_spelled_with_units(count: float, text: str) -> None:
    assert spell_bytes(count) == text
