"""Timelines in Horovod's form, for programs that read its names of events."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.launch import cli
from farandole.timeline.horovod import spell_as_horovod
from farandole.timeline.trace import Operation, RankTrace
from helpers.traces import Op, spell_trace, write_trace


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def spans(events: list[dict[str, Any]]) -> list[tuple[int, str, int, int, dict[str, Any]]]:
    """Return process, name, begin, end and arguments of what B and E events enclose, as Horovod's readers find them."""
    found = []
    open_spans: dict[int, list[tuple[str, int]]] = {}
    for event in events:
        if event["ph"] == "B":
            open_spans.setdefault(event["pid"], []).append((event["name"], event["ts"]))
        elif event["ph"] == "E":
            name, begin = open_spans[event["pid"]].pop()
            assert begin <= event["ts"]
            found.append((event["pid"], name, begin, event["ts"], event.get("args", {})))
    assert not any(open_spans.values())
    return found


def test_events_have_horovods_names(tmp_path: Path) -> None:
    """Negotiation begins with the first rank that asks, and a tick shows each of them."""
    mark = {"name": "plan", "ts": 1500.0, "pid": 0, "tid": 9, "ph": "i", "s": "p", "args": {"buckets": 2}}
    again = Op("allgather.b", 3000, 3100, 3300, 80, "allgather")
    early = [Op("allreduce.a", 1000, 1500, 1700, queued=100.0, algorithm="shm"), again]
    late = [Op("allreduce.a", 1350, 1500, 1690), again._replace(asked=2950)]
    (tmp_path / "t.json").write_text(spell_trace(0, early).replace("[\n", f"[\n{json.dumps(mark)},\n", 1))
    write_trace(tmp_path / "t.rank1.json", 1, late)
    assert cli.main(["timeline", "horovod", str(tmp_path / "t.json"), "-o", str(tmp_path / "out.json")]) == 0
    events = json.loads((tmp_path / "out.json").read_text())
    names = {each["pid"]: each["args"]["name"] for each in events if each["ph"] == "M" and "name" in each["args"]}
    assert names == {0: "", 1: "allreduce.a", 2: "allgather.b"}
    timed = [each for each in events if each["ph"] != "M"]
    assert [each["ts"] for each in timed] == sorted(each["ts"] for each in timed) and timed[0]["ts"] == 0
    assert spans(timed) == [
        (1, "NEGOTIATE_ALLREDUCE", 0, 400, {}),
        (1, "QUEUE", 400, 500, {}),
        (1, "ALLREDUCE", 400, 700, {"bytes": 4000, "algorithm": "shm"}),
        (2, "NEGOTIATE_ALLGATHER", 1950, 2100, {}),
        (2, "ALLGATHER", 2100, 2300, {"bytes": 80}),
    ]
    ticks = [(each["pid"], each["name"], each["ts"], each["dur"]) for each in timed if each["ph"] == "X"]
    assert ticks == [(1, "0", 0, 0), (1, "1", 350, 0), (2, "1", 1950, 0), (2, "0", 2000, 0)]
    assert [(each["name"], each["ts"]) for each in timed if each["ph"] == "i"] == [("CYCLE_START", 500)]


TIMES = st.integers(0, 50_000)
OPERATIONS = st.builds(
    lambda name, asked, waited, queued, ran: Operation(
        name, name, "allreduce", asked, (asked or 0) + waited + queued, (asked or 0) + waited + queued + ran, 4, queued
    ),
    st.sampled_from("ab"),
    st.none() | TIMES,
    *[TIMES] * 3,
)


@given(st.dictionaries(st.integers(0, 3), st.lists(OPERATIONS, max_size=5), max_size=3))
def test_spans_enclose_each_other_whatever_the_clocks_say(shown: dict[int, list[Operation]]) -> None:
    ranks = {
        rank: RankTrace(rank, operations=sorted(operations, key=lambda each: each.end))
        for rank, operations in shown.items()
    }
    timed = [each for each in json.loads("".join(spell_as_horovod(ranks, [], []))) if each["ph"] != "M"]
    assert len(spans(timed)) >= max((len(each) for each in shown.values()), default=0)


@pytest.mark.parametrize("text", ["", "[\n"])
def test_of_nothing_there_is_an_empty_timeline(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    assert cli.main(["timeline", "horovod", str(tmp_path / "t.json"), "-o", str(tmp_path / "out.json")]) == 0
    assert len(json.loads((tmp_path / "out.json").read_text())) == 2
