"""Time of asynchronous allreduces of 4 B while both cores compute, and the costs of submits and timelines.

    python bench/latency.py [--full] [--rounds 5]

Each rank computes for about 300 us, +- 25 %, submits, and continues to compute. The engine's threads must therefore
wake up and work beside the computation. Before the next submit a rank waits for the previous operation. An operation
lasts from the last rank's submit to the last rank's completion; the engine's trace or the peer's callback records the
completion. "1 ms cycle" is a thread that looks for submitted tensors once per millisecond, as Horovod's does, and calls
farandole's blocking allreduce. The speed of the computation (on the slowest rank) is compared with that of rounds
without operations. Submits are timed without waiting, through the public function and the engine's. The cost of a
timeline is the difference between blocking operations with and without a timeline, per event. Prints one table and
writes bench/results/*-latency.json."""

import json
import queue
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import repeat
from pathlib import Path

import peers
import torch
import torch.distributed as dist
from comparison import OURS, Line, compare, limit, table
from peers import LAUNCHERS, BenchRank, Times
from race import Race, record

import farandole.torch as hvd
from farandole.config import Config
from farandole.core import default
from farandole.core.context import Context
from farandole.core.monitoring.timeline import timeline_path
from farandole.core.operations import kinds
from farandole.core.operations.request import Request

ASYNC, WORK = "async 4 B while computing", "work done beside it"
IDLE, CYCLE, GLOO = "computation alone", "1 ms cycle", "gloo"
MUST: Mapping[str, Mapping[str, float]] = {ASYNC: {CYCLE: 20}, WORK: {IDLE: 0.95}}
LIMIT_US = 40.0
PIECE_US, JITTER = 300.0, 0.25
NAME = "late"
SUBMIT, SUBMIT_ENGINE = "submit one torch tensor", "submit one torch tensor, engine"
TIMELINE, UNTRACED, EVENT = "blocking 4 B with a timeline", "without a timeline", "timeline, per event"
SUBMIT_LIMIT_US, EVENT_LIMIT_US = 0.3, 0.025
SUBMITS, BLOCKING = 100, 1000  # operations of one turn
CATCH_UP = timedelta(seconds=30)


class Work:
    """A computation in steps of a few microseconds that holds its core but not the interpreter's lock for long."""

    def __init__(self, seed: int) -> None:
        self._matrix = torch.eye(64)
        self._random = random.Random(seed)
        self.steps = 0

    def piece(self) -> None:
        """Compute for about `PIECE_US` microseconds."""
        end = time.perf_counter_ns() + int(PIECE_US * 1e3 * (1 + JITTER * self._random.uniform(-1, 1)))
        while time.perf_counter_ns() < end:
            self._matrix.mm(self._matrix)
            self.steps += 1


@dataclass(frozen=True, slots=True)
class Way:
    """A way to submit operations. `completed` waits for all and returns their times of completion in nanoseconds."""

    submit: Callable[[], None]
    completed: Callable[[], list[int]]


def ours(context: Context) -> Way:
    tensor = torch.ones(1)
    handles: list[hvd.Handle[torch.Tensor]] = []

    def submit() -> None:
        if handles:
            hvd.synchronize(handles[-1])
        handles.append(hvd.allreduce_async_(tensor, name=NAME, op=hvd.Sum))

    def completed() -> list[int]:
        hvd.synchronize(handles[-1])
        handles.clear()
        return []  # the trace has the times

    return Way(submit, completed)


def by_gloo() -> Way:
    tensor, stamps = torch.ones(1), queue.SimpleQueue[int]()
    works: list[dist.Work] = []

    def submit() -> None:
        if works:
            works[-1].wait()
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.get_future().add_done_callback(lambda _: stamps.put(time.perf_counter_ns()))
        works.append(work)

    def completed() -> list[int]:
        found = [stamps.get(timeout=CATCH_UP.total_seconds()) for _ in works]
        works.clear()
        return found

    return Way(submit, completed)


@contextmanager
def by_cycle(context: Context) -> Iterator[Way]:
    """Yield a way whose thread looks for submitted tensors once per millisecond."""
    tensor, stamps, asked = torch.ones(1), queue.SimpleQueue[int](), queue.SimpleQueue[bool]()
    counts, free, turning, stop = [0], threading.Semaphore(1), threading.Event(), threading.Event()

    def run() -> None:
        with default.use(context):
            # The thread sleeps between its turns, so that it does not slow the other contenders.
            while turning.wait() and not stop.wait(0.001):
                while not asked.empty():
                    asked.get()
                    hvd.allreduce_(tensor, name=CYCLE, op=hvd.Sum)
                    stamps.put(time.perf_counter_ns())
                    free.release()

    def submit() -> None:
        turning.set()
        if not free.acquire(timeout=CATCH_UP.total_seconds()):
            raise TimeoutError(f"the operation before took longer than {CATCH_UP}")
        counts[0] += 1
        asked.put(True)

    def completed() -> list[int]:
        found = [stamps.get(timeout=CATCH_UP.total_seconds()) for _ in range(counts[0])]
        turning.clear()
        counts[0] = 0
        return found

    thread = threading.Thread(target=run, name="cycle")
    thread.start()
    try:
        yield Way(submit, completed)
    finally:
        stop.set()
        turning.set()
        thread.join()


def turn(bench: BenchRank, work: Work, way: Way | None, count: int) -> tuple[list[int], list[int], float]:
    """Submit `count` times; return the times of submits and of completions, and the steps of work per second."""
    bench.barrier()
    submitted, begin, steps = [], time.perf_counter(), work.steps
    for _ in range(count):
        work.piece()
        if way is not None:
            submitted.append(time.perf_counter_ns())
            way.submit()
    work.piece()
    speed = (work.steps - steps) / (time.perf_counter() - begin)
    return submitted, way.completed() if way is not None else [], speed


def measure(bench: BenchRank) -> dict[str, Times]:
    """Measure as one rank; return the times by title and contender."""
    rounds, count = int(str(bench.options["rounds"])), int(str(bench.options["count"]))
    names = (OURS, IDLE, GLOO, CYCLE)
    results: dict[str, Times] = {
        ASYNC: {name: [] for name in names if name != IDLE},
        WORK: {name: [] for name in names},
    }
    submitted: list[list[int]] = []
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder, ExitStack() as stack:
        stack.enter_context(bench.gloo())
        trace = str(Path(folder, "trace.json"))
        with ExitStack() as running:
            context = running.enter_context(bench.context("traced", Config.from_environment(timeline=trace)))
            running.enter_context(default.use(context))
            ways: dict[str, Way | None] = {OURS: ours(context), IDLE: None, GLOO: by_gloo()}
            ways[CYCLE] = running.enter_context(by_cycle(context))
            for title, times in measure_submits(bench, context, rounds).items():
                results[title] = times
            work = Work(bench.rank)
            for number in range(rounds + 1):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    begins, ends, speed = turn(bench, work, ways[name], count)
                    if name == OURS:
                        submitted.append(begins)
                    elif ends and number > 0:
                        results[ASYNC][name].append(list(zip(begins, ends, strict=True)))
                    if number > 0:
                        # Recorded as the time of a thousand steps, to be compared like all other times.
                        results[WORK][name].append([(0, int(1e12 / speed))])
        completions = iter(read_trace(timeline_path(trace, bench.rank)))
        with ExitStack() as running:
            blocking = str(Path(folder, "blocking.json"))
            contexts = {
                OURS: running.enter_context(bench.context("timeline", Config.from_environment(timeline=blocking))),
                UNTRACED: running.enter_context(bench.context("no timeline", Config.from_environment())),
            }
            results[TIMELINE] = measure_timeline(bench, contexts, rounds)
        events = json.loads(timeline_path(blocking, bench.rank).read_text(encoding="utf-8"))
        recorded = sum(each["ph"] == "X" for each in events)
        results[EVENT] = {OURS: [[(0, round(recorded / BLOCKING / (rounds + 1)) or 1)]]}
        for number, begins in enumerate(submitted):
            pairs = [(begin, next(completions)) for begin in begins]
            if number > 0:
                results[ASYNC][OURS].append(pairs)
    return results


def measure_submits(bench: BenchRank, context: Context, rounds: int) -> dict[str, Times]:
    """Return the nanoseconds of one submit among many without waits, by title and contender."""
    tensors = [torch.ones(1) for _ in range(SUBMITS)]
    names = [f"submitted.{place}" for place in range(SUBMITS)]
    # The calls of `allreduce_async_`, but made from C, so that only the engine's part is timed.
    in_engine = partial(map, context.engine.start, repeat(Request(kinds.ALLREDUCE, "submitted")))
    ways: dict[str, Callable[[], Iterable[object]]] = {
        SUBMIT: lambda: (
            hvd.allreduce_async_(tensor, name=name, op=hvd.Sum) for tensor, name in zip(tensors, names, strict=True)
        ),
        SUBMIT_ENGINE: lambda: in_engine(names, tensors, tensors),
        GLOO: lambda: (dist.all_reduce(tensor, async_op=True) for tensor in tensors),
    }
    taken: dict[str, list[list[tuple[int, int]]]] = {name: [] for name in ways}
    with default.use(context):
        for number in range(rounds + 1):
            for kind, way in ways.items():
                for time_it in (False, number > 0):  # the first pass warms the caches
                    bench.barrier()
                    begin = time.perf_counter_ns()
                    pending = list(way())
                    each = (time.perf_counter_ns() - begin) // SUBMITS
                    while pending:  # drop the handles, as a program does
                        pending.pop().wait()  # type: ignore[attr-defined]
                    if time_it:
                        taken[kind].append([(0, each)])
    gloo = taken[GLOO]
    return {SUBMIT: {OURS: taken[SUBMIT], GLOO: gloo}, SUBMIT_ENGINE: {OURS: taken[SUBMIT_ENGINE], GLOO: gloo}}


def measure_timeline(bench: BenchRank, contexts: Mapping[str, Context], rounds: int) -> Times:
    """Return the nanoseconds of one blocking operation, by context."""
    tensor = torch.ones(1)
    taken: Times = {name: [] for name in contexts}
    for number in range(rounds + 1):
        for name, context in contexts.items():
            with default.use(context):
                bench.barrier()
                begin = time.perf_counter_ns()
                for _ in range(BLOCKING):
                    hvd.allreduce_(tensor, name="traced", op=hvd.Sum)
                if number > 0:
                    taken[name].append([(0, (time.perf_counter_ns() - begin) // BLOCKING)])
    return taken


def per_event(race: Race, events: int) -> Race:
    """Return the cost of one event of a timeline; each traced operation has `events` events."""
    pairs = zip(race.seconds[OURS], race.seconds[UNTRACED], strict=True)
    # The difference of two noisy times may be negative: then record almost 0.
    return Race({OURS: [max((on - off) / events, 1e-10) for on, off in pairs]})


def read_trace(path: Path) -> list[int]:
    """Return the times of completion of farandole's operations, sorted, on the clock of `time.perf_counter_ns`."""
    events = json.loads(path.read_text(encoding="utf-8"))
    ours = [each for each in events if each["name"] == "allreduce" and each["args"]["tensor"] == f"allreduce.{NAME}"]
    return sorted(int((each["ts"] + each["dur"]) * 1e3) for each in ours)


def main() -> None:
    given = peers.arguments(__doc__).parse_args()
    options = {"rounds": given.rounds, "count": 1000 if given.full else 200}
    ranks = peers.run_ranks(__file__, 2, LAUNCHERS["plain"], options)
    events = ranks[0][EVENT][OURS][0][0][1]
    races: dict[str, Race] = peers.races_of(ranks)
    races[EVENT] = per_event(races[TIMELINE], events)
    lines: list[Line] = compare(ASYNC, races[ASYNC], MUST[ASYNC])
    lines.append(limit(ASYNC, races[ASYNC], LIMIT_US))
    lines += compare(WORK, races[WORK], MUST[WORK])
    lines += compare(SUBMIT, races[SUBMIT], {}) + compare(SUBMIT_ENGINE, races[SUBMIT_ENGINE], {})
    lines.append(limit(SUBMIT_ENGINE, races[SUBMIT_ENGINE], SUBMIT_LIMIT_US))
    lines += compare(TIMELINE, races[TIMELINE], {})
    lines.append(limit(f"{EVENT} of {events}", races[EVENT], EVENT_LIMIT_US))
    sys.stdout.write(f"{table('asynchronous operations, 2 ranks', lines)}\n")
    sys.stdout.write(f"{record('latency', races, ('farandole', 'torch'), lines)}\n")


if __name__ == "__main__":
    bench = peers.bench_rank_of(sys.argv)
    if bench is None:
        main()
    else:
        bench.leave(measure(bench))
