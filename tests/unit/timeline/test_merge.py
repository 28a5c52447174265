"""Timelines of several ranks as one: clocks, files that a kill cut off, damaged ones."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farandole.errors import TraceError
from farandole.launch import cli
from farandole.timeline.clocks import compare_clocks
from farandole.timeline.reading import read_traces
from farandole.timeline.trace import Operation, RankTrace
from helpers.traces import Op, spell_trace, write_trace

MS = 1_000_000  # ns


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def steps(count: int, *, start: float = 1e6, late: float = 0.0) -> list[Op]:
    """So many steps of 10 ms and a bit, each of a bucket of two and a single one; `late` is asked for later."""
    ops = []
    for step in range(count):
        at = start + 10_000.0 * step + 37.0 * step * step
        ops += [Op(name, at + late, at + 2000, at + 3000) for name in ("allreduce.a", "allreduce.b")]
        ops.append(Op("allgather.c", at + late, at + 3500, at + 3600, 80, "allgather", queued=400.0, algorithm="links"))
    return ops


def shifted(ops: list[Op], by: float) -> list[Op]:
    return [
        op._replace(asked=None if op.asked is None else op.asked + by, begin=op.begin + by, end=op.end + by)
        for op in ops
    ]


def rank_trace(rank: int, ends: list[int], host: str | None, *, kind: str = "allreduce") -> RankTrace:
    return RankTrace(rank, host, None, [Operation("t", "t", kind, None, end - 1, end, 4) for end in ends])


def merged(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    whole = json.loads(path.read_text())
    return whole["traceEvents"], whole["otherData"]


OFFSETS = st.integers(-(10**15), 10**15).filter(lambda offset: abs(offset) > 3 * MS)


@given(
    offsets=st.dictionaries(st.sampled_from("bcd"), OFFSETS, min_size=1),
    hosts=st.lists(st.sampled_from("abcd"), min_size=1, max_size=7),
    jitter=st.lists(st.integers(0, MS // 2), min_size=15, max_size=15),
    gaps=st.lists(st.integers(2 * MS, 50 * MS), min_size=5, max_size=40),
    lost=st.integers(0, 3),
    from_front=st.booleans(),
)
def test_offsets_are_found(
    offsets: dict[str, int], hosts: list[str], jitter: list[int], gaps: list[int], lost: int, from_front: bool
) -> None:
    hosts = ["a", *hosts]  # the reference
    ends = [sum(gaps[: count + 1]) for count in range(len(gaps))]
    traces = {}
    for rank, host in enumerate(hosts):
        seen = [end + offsets.get(host, 0) + jitter[(rank * 7 + n) % 15] for n, end in enumerate(ends)]
        if rank == len(hosts) - 1 and lost and len(set(gaps)) == len(gaps):
            seen = seen[lost:] if from_front else seen[:-lost]
        traces[rank] = rank_trace(rank, seen, host)
    clocks = compare_clocks(traces)
    assert sorted(rank for clock in clocks for rank in clock.ranks) == list(range(len(hosts)))
    for clock in clocks:
        assert clock.host is not None and {hosts[rank] for rank in clock.ranks} == {clock.host}
        truth = offsets.get(clock.host, 0)
        if clock.reference:
            assert clock.ahead == clock.shift == 0
        elif len(set(gaps)) == len(gaps) or not lost:
            assert abs(clock.ahead - truth) <= MS // 2
            assert clock.shift == (clock.ahead if truth else 0)


def test_a_host_of_unknown_name_is_shifted_only_beyond_a_millisecond() -> None:
    ends = [10 * MS, 25 * MS, 60 * MS]
    for offset, shift in [(MS // 2, 0), (5 * MS, 5 * MS)]:
        there = rank_trace(1, [end + offset for end in ends], None)
        clocks = compare_clocks({0: rank_trace(0, ends, None), 1: there})
        assert [(clock.ahead, clock.shift) for clock in clocks] == [(0, 0), (offset, shift)]


def test_ranks_of_one_host_are_never_shifted() -> None:
    late = rank_trace(1, [100 * MS, 200 * MS], "a")
    (clock,) = compare_clocks({0: rank_trace(0, [10 * MS, 25 * MS], "a"), 1: late})
    assert clock.ranks == (0, 1) and clock.shift == 0


@pytest.mark.parametrize("kind", ["allreduce", "broadcast"])
def test_a_clock_that_nothing_tells_stays(kind: str) -> None:
    far = rank_trace(1, [90 * MS] if kind == "broadcast" else [], "b", kind=kind)
    _, clock = compare_clocks({0: rank_trace(0, [10 * MS], "a", kind="allreduce"), 1: far})
    assert (clock.meetings, clock.shift) == (0, 0) and "not compared" in str(clock)


def test_an_offset_that_is_not_sure_is_not_applied() -> None:
    there = rank_trace(1, [7 * MS, 290 * MS, 25 * MS], "b")
    _, clock = compare_clocks({0: rank_trace(0, [10 * MS, 200 * MS, 99 * MS], "a"), 1: there})
    assert clock.spread > abs(clock.ahead) > 1 * MS and clock.shift == 0


def test_late_ends_do_not_speak_of_another_clock() -> None:
    def trace(rank: int, *times: tuple[int, int]) -> RankTrace:
        operations = [Operation("t", "t", "allreduce", None, begin * MS, end * MS, 4) for begin, end in times]
        return RankTrace(rank, "ab"[rank], None, operations)

    first, late = trace(0, (10, 12), (20, 21)), trace(1, (12, 19), (20, 26))
    _, clock = compare_clocks({0: first, 1: late})
    assert clock.ahead == 6 * MS > clock.spread and clock.shift == 0
    # A millisecond more, and the first operation begins on one host after its end on the other.
    _, clock = compare_clocks({0: first, 1: trace(1, (13, 20), (21, 27))})
    assert clock.shift == clock.ahead == 7 * MS


def test_a_merged_trace_is_on_one_clock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = tmp_path / "t.json"
    for rank in range(3):
        ops = shifted(steps(5), 7e9) if rank == 2 else steps(5)
        path = first if rank == 0 else tmp_path / f"t.rank{rank}.json"
        write_trace(path, rank, ops, host="ab"[rank // 2], size=3)
    out = tmp_path / "out.json"
    with caplog.at_level(logging.INFO):
        assert cli.main(["timeline", "merge", str(first), "-o", str(out)]) == 0
    assert "host b): 7,000,000.000 ms ahead, give or take 0.000 ms in 15 operations; shifted" in caplog.text
    events, about = merged(out)
    assert [(clock["ranks"], clock["shifted_us"]) for clock in about["clocks"]] == [([0, 1], 0.0), ([2], -7e9)]
    by_rank = [
        [(each["name"], each["ts"], each["dur"], each.get("args"), each["tid"]) for each in events
         if each["ph"] == "X" and each["pid"] == rank]
        for rank in range(3)
    ]  # fmt: skip
    assert by_rank[0] == by_rank[1] == by_rank[2] and len(by_rank[0]) == 35
    names = {each["pid"]: each["args"] for each in events if each["name"] == "process_name"}
    assert names == {rank: {"name": f"rank {rank}", "host": "ab"[rank // 2], "size": 3} for rank in range(3)}
    assert out.parent == tmp_path and len(list(tmp_path.iterdir())) == 4  # nothing unfinished stays
    assert cli.main(["timeline", "merge", str(out), "-o", str(tmp_path / "again.json")]) == 0
    assert merged(tmp_path / "again.json")[0] == events


def test_other_events_are_kept_and_shifted(tmp_path: Path) -> None:
    mark = {"name": "plan", "ts": 7e9 + 5.5, "pid": 1, "tid": 9, "ph": "i", "s": "p", "args": {"buckets": 2}}
    write_trace(tmp_path / "0.json", 0, steps(3))
    text = spell_trace(1, shifted(steps(3), 7e9)).replace("[\n", f"[\n{json.dumps(mark)},\n", 1)
    (tmp_path / "1.json").write_text(text)
    assert cli.main(["timeline", "merge", *(str(tmp_path / f"{n}.json") for n in "01"), "-o", f"{tmp_path}/o"]) == 0
    events, _ = merged(tmp_path / "o")
    assert {**mark, "ts": 5.5} in events


WHOLE = spell_trace(0, steps(2), host="a")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(WHOLE) - 1))
def test_a_file_cut_anywhere_is_read_as_far_as_it_is_whole(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.json"
    path.write_text(WHOLE[:length])
    traces = read_traces([path])
    complete = sum('"tensor"' in line for line in WHOLE[:length].split(",\n")[:-1])
    operations = traces.ranks[0].operations if traces.ranks else []
    assert complete <= len(operations) <= complete + 1  # the last one may lack no more than its comma
    if WHOLE[:length].rstrip().endswith("]"):
        assert traces.warnings == []
    else:
        place = f"line {WHOLE[:length].count(chr(10)) + 1}, "
        assert len(traces.warnings) == 1 and f"{path}: cut off at {place}" in traces.warnings[0]


def damage(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (damage('"ts": 1', '"ts" 1'), "damaged at line 4, column 1: Expecting ':'"),
        (damage("},\n", "}\n"), "damaged at line 3, column 1: there is neither ',' nor ']'"),
        (damage("},\n", "},\n\0\0\0"), "damaged at line 3, column 1"),
        (damage('"ph": "X"', '"ph": 3'), "event 3: has no ph"),
        (damage('"ts": 1000000.0', '"ts": 1e999'), "event 3: ts must be a number of microseconds, got inf"),
        (damage('"ts": 1000000.0', '"ts": NaN'), "damaged at line 4, column 1: NaN is no JSON"),
        (damage('"dur": 2000.0', '"dur": -1'), "event 3: dur is negative"),
        (damage('"bytes": 4000', '"bytes": -1'), "event 4: bytes must be a whole number >= 0, got -1"),
        (damage('"pid": 0', '"pid": true'), "event 1: pid must be a whole number >= 0, got True"),
        (damage("[\n", "[\n7,\n"), "event 1: is no JSON object"),
        (damage("[\n", "[\n" + "[" * 100_000 + "\n"), "damaged at line 2, column 1"),
        (lambda text: text + "[]", "there is more behind the end of the array"),
        (lambda text: "root:x:0", "line 1, column 1: not a timeline, which begins with '['"),
        (lambda text: "{}", "not a timeline: there are no traceEvents"),
        (lambda text: '{"traceEvents": [', "damaged: Expecting value: line 1 column 18"),
    ],
)
def test_a_damaged_file_is_refused_with_the_place(
    change: Callable[[str], str], problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, text = tmp_path / "t.json", change(WHOLE)
    assert text != WHOLE
    path.write_text(text)
    assert cli.main(["timeline", "merge", str(path), "-o", str(tmp_path / "out")]) == 1
    (sentence,) = caplog.messages
    assert sentence.startswith(f"{path}: ") and problem in sentence
    assert list(tmp_path.iterdir()) == [path]


@given(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=4))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_file_holds_is_read_or_refused(tmp_path: Path, at: int, junk: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(WHOLE[:at].encode() + junk + WHOLE[at:].encode())
    try:
        traces = read_traces([path])
    except TraceError as error:
        assert str(path) in str(error)
    else:
        assert set(traces.ranks) and compare_clocks(traces.ranks)


def test_which_files_belong_together(tmp_path: Path) -> None:
    for rank, name in enumerate(["t.json", "t.rank1.json", "t.rank2.json"]):
        write_trace(tmp_path / name, rank, steps(1), size=2)
    (tmp_path / "t.rank1.json.bak").write_text("")
    traces = read_traces([tmp_path / "t.json"])
    assert list(traces.ranks) == [0, 1] and "of another job" in traces.warnings[0]
    traces = read_traces([tmp_path / "t.rank1.json"])
    assert list(traces.ranks) == [1] and traces.warnings == ["there were 2 ranks; no timeline here is that of rank 0"]
    write_trace(tmp_path / "u.json", 1, steps(1))
    with pytest.raises(TraceError, match="holds rank 1, and so does"):
        read_traces([tmp_path / "t.rank1.json", tmp_path / "u.json"])
    with pytest.raises(TraceError, match="cannot be read"):
        read_traces([tmp_path / "none.json"])


@pytest.mark.parametrize("text", ["", "[]", "[\n"])
def test_an_empty_file_is_said_to_be_empty(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    traces = read_traces([tmp_path / "t.json"])
    assert traces.ranks == {} and len(traces.warnings) == 1


def test_where_nothing_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_trace(tmp_path / "t.json", 0, steps(1))
    for output, why in [(path, "name another one"), (tmp_path, "directory"), (tmp_path / "no" / "o", "No such file")]:
        assert cli.main(["timeline", "merge", str(path), "-o", str(output)]) == 1
        assert why in caplog.messages[-1]
    assert cli.main(["timeline", "merge", str(path), "-o", "/dev/null"]) == 0
    assert list(tmp_path.iterdir()) == [path]
