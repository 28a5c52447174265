"""The timeline: a file per rank, whole at any moment, switched on and off at any time, refused before any start."""

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

import farandole.numpy as hvd
from farandole._native import TraceText
from farandole.compat.speech import Speech
from farandole.config import Config
from farandole.core.context import Context
from farandole.core.default import use
from farandole.core.monitoring.timeline import BUSY_BYTES, BUSY_SECONDS, QUIET_SECONDS, Timeline
from farandole.core.monitoring.trace_file import TraceFile
from farandole.errors import ConfigError, EngineClosed, HorovodInternalError, RendezvousError
from farandole.launch.cli import main
from farandole.meeting.rendezvous import SoloRendezvous
from farandole.timeline.files import timeline_path
from farandole.timeline.reading import read_traces
from helpers.ranks import run_ranks
from helpers.recurring import recurring

ALLREDUCE = 0
PATIENCE = 60.0


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def tensors(path: Path) -> list[str]:
    """The tensors whose reductions a file shows, in its order."""
    return [event["args"]["tensor"] for event in read(path) if event["name"] == "allreduce"]


def reduce_twice(context: Context) -> None:
    values = np.ones(1000, np.float32)
    for _ in range(2):
        context.engine.run(recurring(ALLREDUCE), "allreduce.x", values, values)


def test_each_rank_writes_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run_ranks(2, reduce_twice, config=Config(timeline=str(path)))
    for rank in range(2):
        reductions = [event for event in read(timeline_path(path, rank)) if event["name"] == "allreduce"]
        assert len(reductions) == 2
        # The first is agreed with the coordinator; whether the second is depends on the number of cores.
        ways = [event["args"].pop("algorithm") for event in reductions]
        assert ways[0] == "shm slots" and ways[1] in ("shm slots", "lane")
        assert all(event["args"] == {"tensor": "allreduce.x", "bytes": 4000} for event in reductions)
        assert all(event["pid"] == rank and event["dur"] >= 0 for event in reductions)


@pytest.mark.parametrize(
    ("size", "hosts", "ways"),
    [
        # One rank has nothing to copy.
        (1, 1, {"small": "alone", "large": "alone", "shared": "alone", "rows": "links"}),
        (2, 1, {"small": "shm at once", "large": "shm slots", "shared": "shm direct", "rows": "shm slots"}),
        (
            2,
            2,
            {"small": "links at once", "large": "links by segments", "known": "coordinator", "rows": "links"},
        ),
        (4, 2, {"small": "grid in two hops", "large": "grid pipeline", "rows": "grid"}),
    ],
)
def test_the_algorithm_and_the_bytes_are_told(size: int, hosts: int, ways: dict[str, str], tmp_path: Path) -> None:
    def body(context: Context) -> None:
        small, large = np.ones(100, np.float32), np.ones(1_000_000, np.float32)
        hvd.allreduce(small, name="small")
        hvd.allreduce(large, name="large")
        for _ in range(2 if hosts == size > 1 else 0):  # from its second request on, the name is known
            hvd.allreduce(small, name="known")
        if hosts == 1:
            shared = hvd.empty_shared(large.shape, large.dtype)
            shared[:] = 1
            hvd.allreduce_(shared, name="shared")
        hvd.allgather(small, name="rows")
        hvd.allreduce(large, name="adasum", op=hvd.Adasum)

    run_ranks(size, body, config=Config(timeline=str(tmp_path / "t.json")), hosts=hosts)
    sizes = {"small": 400, "known": 400, "rows": 400}
    for rank in range(size):
        shown = {event["args"]["tensor"].partition(".")[2]: event["args"] for event in
                 read(timeline_path(tmp_path / "t.json", rank)) if event["ph"] == "X" and "args" in event}  # fmt: skip
        assert {name: args["algorithm"] for name, args in shown.items()} == {**ways, "adasum": "adasum"}
        assert all(args["bytes"] == sizes.get(name, 4_000_000) for name, args in shown.items())


def test_what_waits_for_the_bucket_before_it_is_queued(tmp_path: Path) -> None:
    def body(context: Context) -> None:
        large, other = np.ones(1_000_000, np.float32), np.ones(10, np.float64)
        hvd.grouped_allreduce([large, other], name="mixed")

    run_ranks(2, body, config=Config(timeline=str(tmp_path / "t.json")))
    for rank in range(2):
        events = read(timeline_path(tmp_path / "t.json", rank))
        tracks = {each["tid"]: [e for e in events if e["ph"] == "X" and e["tid"] == each["tid"]]
                  for each in events if each["name"] == "thread_name"}  # fmt: skip
        first, second = sorted(tracks.values(), key=lambda phases: phases[-1]["ts"])
        assert [phase["name"] for phase in second] == ["negotiate", "queue", "allreduce"]
        assert [phase["name"] for phase in first][-1] == "allreduce"
        for phase, following in pairwise(second):
            assert phase["ts"] + phase["dur"] == pytest.approx(following["ts"])
        # It waited while the first one ran.
        assert second[1]["dur"] >= first[-1]["dur"]


@pytest.mark.parametrize("config", [Config(), Config(timeline="DYNAMIC")], ids=["nothing said", "DYNAMIC"])
def test_each_start_has_a_file_of_what_came_after_it(config: Config, tmp_path: Path) -> None:
    def body(context: Context) -> None:
        some = hvd.add_process_set([0])
        for turn in range(3):
            hvd.allreduce(np.ones(4), name=f"before{turn}")
            hvd.start_timeline(tmp_path / f"{turn}.json")
            hvd.allreduce(np.ones(4), name=f"x{turn}")
            if some.included():
                hvd.allreduce(np.ones(4), name=f"y{turn}", process_set=some)
            hvd.stop_timeline()
        hvd.allreduce(np.ones(4), name="behind")

    run_ranks(2, body, config=config)
    for turn in range(3):
        of_rank = [tensors(timeline_path(tmp_path / f"{turn}.json", rank)) for rank in range(2)]
        assert of_rank == [[f"allreduce.x{turn}", f"allreduce.y{turn}"], [f"allreduce.x{turn}"]]
    assert not Path("DYNAMIC").exists()


def test_what_was_asked_for_before_the_start_begins_with_it(tmp_path: Path) -> None:
    path, started = tmp_path / "trace.json", threading.Event()

    def body(context: Context) -> float:
        if hvd.rank() == 0:
            waiting = hvd.allreduce_async(np.ones(4), name="early")
            begin = time.perf_counter_ns() / 1e3  # the same clock
            hvd.start_timeline(path)
            started.set()
            hvd.synchronize(waiting)
            return begin
        else:
            assert started.wait(PATIENCE)
            hvd.allreduce(np.ones(4), name="early")
        return 0.0

    begin = max(run_ranks(2, body))
    phases = {event["name"]: event for event in read(path) if event["ph"] == "X"}
    queued = phases.pop("queue", {"dur": 0.0})["dur"]  # of a thread that was interrupted
    assert set(phases) == {"negotiate", "allreduce"}
    assert phases["negotiate"]["ts"] >= begin and phases["negotiate"]["dur"] >= 0
    agreed = phases["negotiate"]["ts"] + phases["negotiate"]["dur"]
    assert agreed + queued == pytest.approx(phases["allreduce"]["ts"])


@pytest.mark.parametrize("again", ["same.json", "other.json"])
def test_a_start_completes_the_file_before(again: str, tmp_path: Path) -> None:
    def body(context: Context) -> None:
        hvd.start_timeline(str(tmp_path / "same.json"))
        hvd.allreduce(np.ones(4), name="first")
        hvd.start_timeline(str(tmp_path / again))
        hvd.allreduce(np.ones(4), name="second")

    run_ranks(1, body)
    assert tensors(tmp_path / again) == ["allreduce.second"]
    if again != "same.json":
        assert tensors(tmp_path / "same.json") == ["allreduce.first"]


@pytest.mark.parametrize("config", [True, False])
def test_plans_are_marked(config: bool, tmp_path: Path) -> None:
    def body(context: Context) -> None:
        if not config:
            hvd.start_timeline(path, mark_cycles=True)
        for _ in range(3):
            hvd.allreduce(np.ones(4), name="x")

    path = tmp_path / "trace.json"
    given = Config(timeline=str(path), timeline_mark_cycles=True) if config else Config()
    run_ranks(2, body, config=given)
    for rank in range(2):
        events = read(timeline_path(path, rank))
        # The first is agreed with the coordinator; whether the others are depends on the number of cores.
        marks = [event["ts"] for event in events if event["name"] == "plan"]
        begins = [event["ts"] for event in events if event["name"] == "allreduce"]
        assert len(marks) == len(begins) == 3
        assert all(mark <= begin for mark, begin in zip(marks, begins, strict=True))


@pytest.fixture
def speech() -> Iterator[None]:
    patch = Speech()
    yield
    patch.end()


def test_programs_of_horovod_find_its_names(speech: None, tmp_path: Path) -> None:
    def body(context: Context) -> None:
        hvd.start_timeline(tmp_path / "trace.json", mark_cycles=True)
        hvd.allreduce(np.ones(4), name='the "queue"')
        hvd.allgather(np.ones(4), name="x")

    run_ranks(2, body)
    names = [event["name"] for event in read(tmp_path / "trace.json") if event["ph"] != "M"]
    assert {*names} - {"QUEUE"} == {
        *("NEGOTIATE_ALLREDUCE", "ALLREDUCE", "NEGOTIATE_ALLGATHER", "ALLGATHER", "CYCLE_START"),
    }
    found = read_traces([tmp_path / "trace.json"])
    assert not found.warnings and [*found.ranks] == [0, 1]
    for trace in found.ranks.values():
        asked = [(each.kind, each.tensor, each.asked is not None) for each in trace.operations]
        assert asked == [("allreduce", 'allreduce.the "queue"', True), ("allgather", "allgather.x", True)]
        assert {each["name"] for each in trace.others} == {"plan"}


def test_a_generation_keeps_the_timeline_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for generation in (0, 1):
        context = Context(SoloRendezvous(generation), Config(timeline=str(path)))
        with context, use(context):
            hvd.allreduce(np.ones(4), name=f"in_{generation}")
    assert tensors(path) == ["allreduce.in_0"]
    assert tensors(tmp_path / "trace.generation1.json") == ["allreduce.in_1"]


def test_a_timeline_started_in_each_generation_of_an_elastic_job_keeps_those_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for generation in (0, 1):
        context = Context(SoloRendezvous(generation))
        with context, use(context):
            hvd.start_timeline(path)
            hvd.allreduce(np.ones(4), name=f"in_{generation}")
    assert tensors(path) == ["allreduce.in_0"]
    assert tensors(tmp_path / "trace.generation1.json") == ["allreduce.in_1"]


def test_what_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    def body(context: Context) -> None:
        hvd.start_timeline(tmp_path / "good.json")
        os.mkfifo(tmp_path / "pipe")
        for wrong, why in [
            ("nowhere/trace.json", "cannot write .*No such file"),
            (".", "is a folder; name a file in it"),
            ("new/", "is a folder; name a file in it"),
            ("pipe", "cannot write .*No such device"),
        ]:
            with pytest.raises(ConfigError, match=rf"timeline: .*{why}"):
                hvd.start_timeline(f"{tmp_path}/{wrong}")
        hvd.allreduce(np.ones(4), name="x")

    run_ranks(1, body)
    assert tensors(tmp_path / "good.json") == ["allreduce.x"]
    with pytest.raises(ConfigError, match=r"timeline: cannot write .*No such file or directory"):
        Context(SoloRendezvous(), Config(timeline=str(tmp_path / "nowhere" / "trace.json")))


def test_when_there_is_nothing_to_start_or_to_stop(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    for call in (lambda: hvd.start_timeline(tmp_path / "t.json"), hvd.stop_timeline):
        with pytest.raises(ValueError, match="initialized") as raised:
            call()
        assert isinstance(raised.value, HorovodInternalError)
    with Context(SoloRendezvous()) as context, use(context), caplog.at_level(logging.WARNING):
        hvd.stop_timeline()
    assert caplog.messages == ["no timeline is being written: there is nothing to stop"]
    with pytest.raises(EngineClosed):
        context.timeline.start(tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_the_timeline_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with Context(SoloRendezvous()) as context, use(context), caplog.at_level(logging.ERROR):
        hvd.start_timeline("/dev/full")
        hvd.stop_timeline()
        assert hvd.allreduce(np.ones(4), name="x").tolist() == [1, 1, 1, 1]
        text = TraceText(0)
        text.take(context.engine, "")
        assert text.next() == b""  # nothing is kept for a file that does not exist
    assert "the timeline ends here: it cannot be written any more" in caplog.text


def test_a_timeline_that_gets_no_thread_can_be_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timeline = Timeline(0, 1, "host")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start new thread"):
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        timeline.start(tmp_path / "first.json")
    timeline.start(tmp_path / "second.json")
    timeline.show("curve", {"loss": 1.0})
    timeline.close()
    assert not (tmp_path / "first.json").read_text()
    assert [event["name"] for event in read(tmp_path / "second.json")] == ["process_name", "curve"]


def test_a_timeline_goes_on_if_the_next_gets_no_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuse = Mock(side_effect=RuntimeError("can't start new thread"))
    timeline = Timeline(0, 1, "host")
    timeline.start(tmp_path / "first.json")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        timeline.start(tmp_path / "second.json")
    timeline.show("curve", {"loss": 1.0})
    timeline.close()
    assert [event["name"] for event in read(tmp_path / "first.json")] == ["process_name", "curve"]
    with pytest.raises(RendezvousError, match="raise the limit on processes"):
        Context(SoloRendezvous(), Config(timeline=str(tmp_path / "third.json")))


def test_the_files_of_two_hosts_become_one(tmp_path: Path) -> None:
    path, out = tmp_path / "trace.json", tmp_path / "merged.json"
    run_ranks(3, reduce_twice, config=Config(timeline=str(path)), hosts=2)
    assert main(["timeline", "merge", str(path), "-o", str(out)]) == 0
    merged = json.loads(out.read_text())
    shown = [(each["pid"], each["ts"]) for each in merged["traceEvents"] if each["name"] == "allreduce"]
    wrote = [(rank, each["ts"]) for rank in range(3) for each in read(timeline_path(path, rank))
             if each["name"] == "allreduce"]  # fmt: skip
    assert shown == wrote and len(wrote) == 6
    # The threads have one clock.
    clocks = [(each["host"], each["ranks"], each["shifted_us"]) for each in merged["otherData"]["clocks"]]
    assert clocks == [("host 0", [0, 2], 0), ("host 1", [1], 0)] and merged["otherData"]["warnings"] == []
    pages = []
    for source in (path, out):
        assert main(["timeline", "report", str(source), "-o", str(tmp_path / "report.html")]) == 0
        pages.append((tmp_path / "report.html").read_text())
    assert pages[0] == pages[1] and "allreduce.x" in pages[0]


ENDLESS = """
import sys
import numpy as np
import farandole.numpy as hvd
hvd.init()
hvd.start_timeline(sys.argv[1])
print("started", flush=True)
while True:
    hvd.allreduce(np.ones(4), name="x")
"""


def test_a_killed_rank_leaves_a_file_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        size = path.stat().st_size
        while path.stat().st_size < size + 100_000:
            assert process.poll() is None
        # Not just when the file has grown: that may be between two pages of one write.
        time.sleep(random.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    # Damage is refused: at most the last event is cut off, where it was going on into a new page.
    (trace,) = read_traces([path]).ranks.values()
    assert {each.tensor for each in trace.operations} == {"allreduce.x"}
    assert len(trace.operations) > 100


def test_an_event_of_a_quiet_job_is_on_disk_at_once(tmp_path: Path) -> None:
    path = timeline_path(tmp_path / "trace.json", 0)
    values = np.ones(10, np.float32)

    def seconds_until_written(name: str) -> float:
        context.engine.run(recurring(ALLREDUCE), name, values, values)
        done = time.monotonic()
        while f'"tensor":"{name}"'.encode() not in path.read_bytes():
            assert time.monotonic() < done + PATIENCE
            time.sleep(0.002)
        return time.monotonic() - done

    with Context(SoloRendezvous(), Config(timeline=str(tmp_path / "trace.json"))) as context:
        # Each event comes right after the file was written, when the next write is farthest away.
        delays = [seconds_until_written(f"allreduce.{number}") for number in range(8)]
    assert sorted(delays[1:])[2] < 0.1, delays  # the machine may be busy during some


def test_a_busy_job_is_looked_at_less_often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pauses: list[float] = []
    events = [b"x" * (BUSY_BYTES + 1), b"x", b""]
    monkeypatch.setattr(Timeline, "_append_events", lambda *_: len(events.pop(0)))

    def wait(pause: float) -> bool:
        pauses.append(pause)
        return not events

    timeline = Timeline(0, 1, "host")
    monkeypatch.setattr(timeline, "_engines", {None: ""})
    timeline._run(cast(threading.Event, SimpleNamespace(wait=wait)))
    assert pauses == [QUIET_SECONDS, BUSY_SECONDS, QUIET_SECONDS, QUIET_SECONDS]


def test_a_file_is_whole_after_every_piece(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("what was there before " * 1000)
    file = TraceFile(path)
    file.append(b",\n".join(json.dumps({"number": number}).encode() for number in range(20_000)))
    assert read(path) == [{"number": number} for number in range(20_000)]
    file.append(b"")
    file.append(b"{}")
    file.close()
    assert read(path) == [*({"number": number} for number in range(20_000)), {}]


def test_curves_leave_out_what_is_no_number(tmp_path: Path) -> None:
    with Context(SoloRendezvous()) as context:
        context.timeline.start(tmp_path / "t.json")
        context.timeline.show("reading", {"rows/s": 3.5, "waiting": float("nan"), "left": float("inf")})
        context.timeline.stop()
    (curve,) = [event for event in read(tmp_path / "t.json") if event["ph"] == "C"]
    assert (curve["name"], curve["args"]) == ("reading", {"rows/s": 3.5})
