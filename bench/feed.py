"""Time until training on a DataFrame begins, and rate of its rows.

    python bench/feed.py [--rows 1000000] [--columns 37] [--rounds 3] [--ranks 2] [--batch 256] [--petastorm PYTHON]

The ranks of a Spark job (local[ranks]) read a DataFrame that Spark has in memory, in shuffled batches, for three
epochs. Three ways take turns: farandole feeds the rows to the ranks within the job; Spark writes Parquet files, which
farandole's loader reads; Spark writes Parquet files, which Petastorm's loader reads in an environment of its own (see
bench/data.py). Petastorm has as many processes as there are ranks; they begin when the ranks of an empty Spark job have
begun. The import of a framework, equally long for each way, does not count: farandole's ranks need none, and
Petastorm's processes have imported torch before.

"first batch" and "first epoch" are the seconds from the call on the driver until all ranks have them, with the writing
of Parquet and the start of the job; "later epoch" is the time of a later epoch. "processor" is the processor time of
all epochs on all cores; on a shared machine it is more reliable than elapsed time. Writes bench/results/*-feed.json.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from comparison import OURS, Line, compare, table
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from race import Race, race, record

from data import PETASTORM, answer
from farandole.data import FeedLoader, Loader, ParquetSource, ShardSource
from farandole.spark import run

EPOCHS = 3
DETOUR, THEIRS = "parquet, our loader", "parquet, petastorm"
LOCALHOST = "127.0.0.1"

# Petastorm's process. It forks for each reading, so that each is the first of its process, as in a job.
PROGRAM = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
import torch
print("ready", flush=True)
for line in sys.stdin:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader
    url, rank, size, batch, epochs = line.split()
    times, seen = [], 0
    for epoch in range(int(epochs)):
        asked = dict(num_epochs=1, workers_count=2, shuffle_rows=True, cur_shard=int(rank), shard_count=int(size))
        with make_batch_reader(url, seed=epoch, **asked) as reader:
            for made in BatchedDataLoader(reader, int(batch), shuffling_queue_capacity=100 * int(batch)):
                if not times:
                    times.append(time.monotonic())
                seen += len(made["label"])
        times.append(time.monotonic())
    print(seen, *times, flush=True)
    os._exit(0)
"""


@dataclass(frozen=True)
class Task:
    """The data to read."""

    frame: DataFrame
    rows: int
    ranks: int
    batch: int
    folder: Path


@dataclass(frozen=True)
class Reading:
    """One rank's number of rows in all epochs, and the times of its first batch and of the end of each epoch."""

    rows: int
    times: tuple[float, ...]


def read(source: str | ShardSource, batch: int) -> Reading:
    """Read all epochs on one rank of farandole."""
    import farandole.numpy as hvd

    hvd.init()
    rank, size, gather = hvd.rank(), hvd.size(), hvd.allgather_object
    if isinstance(source, ShardSource):
        made: Loader | FeedLoader = FeedLoader(
            source, batch_size=batch, policy="join", rank=rank, size=size, gather=gather
        )
    else:
        made = Loader(ParquetSource(source), batch_size=batch, policy="join", rank=rank, size=size)
    times: list[float] = []
    seen = 0
    for _ in range(EPOCHS):
        for columns in made:
            if not times:
                times.append(time.monotonic())
            seen += len(columns["label"])
        times.append(time.monotonic())
    return Reading(seen, tuple(times))


@dataclass(frozen=True)
class Moment:
    """Time of the clock, and processor time of this process and all its descendants: Spark, ranks, peers (seconds)."""

    time: float
    work: float

    @classmethod
    def now(cls) -> "Moment":
        parents, works = {}, {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = entry.read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
            except OSError:
                continue  # the process has just ended; its parent counts its time
            number = int(entry.parent.name)
            parents[number] = int(fields[1])
            works[number] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        own = {os.getpid()}
        while more := {number for number, parent in parents.items() if parent in own} - own:
            own |= more
        return cls(time.monotonic(), sum(works.get(number, 0.0) for number in own))

    def __sub__(self, other: "Moment") -> "Moment":
        return Moment(self.time - other.time, self.work - other.work)


class Timing:
    """Seconds by measurement and contender: first batch, first epoch, later epoch, and writing for Parquet."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.seconds: dict[str, dict[str, list[float]]] = {}
        self.wrote = Moment(0.0, 0.0)

    def fed(self) -> float:
        began = Moment.now()
        return self._note(OURS, run(read, (self.task.frame, self.task.batch), num_proc=self.task.ranks), began)

    def written(self) -> float:
        began = Moment.now()
        self.write()
        return self._note(DETOUR, run(read, (str(self.task.folder), self.task.batch), num_proc=self.task.ranks), began)

    def write(self) -> None:
        began = Moment.now()
        self.task.frame.write.mode("overwrite").parquet(str(self.task.folder))
        self.wrote = Moment.now() - began

    def petastorm(self, processes: "list[subprocess.Popen[str]]") -> float:
        """Read the files that were written last; count the time to write them and to start a job as well."""
        if not self.wrote.time:
            self.write()
        job = Moment.now()
        ranks_began = max(run(time.monotonic, num_proc=self.task.ranks))
        ended = Moment.now()
        # The end of the job does not count.
        spent = Moment(ranks_began - job.time + self.wrote.time, (ended - job).work + self.wrote.work)
        began = ended - spent
        for rank, process in enumerate(processes):
            assert process.stdin is not None
            process.stdin.write(f"{self.task.folder.as_uri()} {rank} {self.task.ranks} {self.task.batch} {EPOCHS}\n")
            process.stdin.flush()
        readings = []
        for process in processes:
            rows, *times = answer(process).split()
            readings.append(Reading(int(rows), tuple(map(float, times))))
        return self._note(THEIRS, readings, began)

    def _note(self, name: str, readings: list[Reading], began: "Moment") -> float:
        worked = (Moment.now() - began).work
        assert sum(reading.rows for reading in readings) == EPOCHS * self.task.rows, f"{name} has lost rows"
        first, *ends = (max(times) for times in zip(*(reading.times for reading in readings), strict=True))
        later = (ends[-1] - ends[0]) / (EPOCHS - 1)
        found = {"first batch": first - began.time, "first epoch": ends[0] - began.time, "later epoch": later}
        found["processor"] = worked
        if name == DETOUR:
            found["writing"] = self.wrote.time
        for what, seconds in found.items():
            self.seconds.setdefault(what, {}).setdefault(name, []).append(seconds)
        epoch: float = ends[0] - began.time
        return epoch


def lines_of(timing: Timing, rounds: int) -> list[Line]:
    """Return the comparisons of all measurements, with their targets."""
    lines = []
    for what in ("first batch", "first epoch", "later epoch", "processor"):
        # Leave out the first round, which warms caches.
        counted = Race({name: values[-rounds:] for name, values in timing.seconds[what].items()})
        lines += compare(what, counted, {THEIRS: 2.0} if what.endswith("epoch") else {})
    return lines


@contextmanager
def session(ranks: int) -> Iterator[SparkSession]:
    """Start Spark with enough memory for the rows."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(f"local[{ranks}]").appName("feed")
    for name, value in {
        "spark.driver.host": LOCALHOST,
        "spark.driver.bindAddress": LOCALHOST,
        "spark.driver.memory": "3g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def make_frame(spark: SparkSession, rows: int, columns: int) -> DataFrame:
    """Return a DataFrame in memory: a label, and columns of floats, ints, doubles and longs."""
    kinds = ["float", "int", "float", "double", "int", "long"]
    made = [(F.rand(place) * 1000).cast(kinds[place % len(kinds)]).alias(f"x{place}") for place in range(columns - 1)]
    frame = spark.range(0, rows, 1, 8).select(*made, F.col("id").alias("label")).persist()
    assert frame.count() == rows
    return frame


def start_petastorm(python: Path, ranks: int) -> "list[subprocess.Popen[str]]":
    """Start Petastorm's process for each rank; return [] if its environment is missing or lacks torch."""
    if not python.exists():
        sys.stdout.write(f"Petastorm is left out: there is no {python}\n")
        return []
    # That environment may use this one's torch, whose plug-ins it cannot load.
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    processes = [subprocess.Popen([python, "-c", PROGRAM], **pipes) for _ in range(ranks)]  # type: ignore[call-overload]
    if any(answer(process) != "ready\n" for process in processes):
        sys.stdout.write("Petastorm is left out: its environment lacks torch, or cannot import it\n")
        end(processes)
        return []
    return processes


def end(processes: "list[subprocess.Popen[str]]") -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


def measure(spark: SparkSession, given: argparse.Namespace, folder: Path) -> tuple[Timing, Race]:
    frame = make_frame(spark, given.rows, given.columns)
    timing = Timing(Task(frame, given.rows, given.ranks, given.batch, folder))
    with ExitStack() as stack:
        contenders: dict[str, Callable[[], float]] = {OURS: timing.fed, DETOUR: timing.written}
        processes = start_petastorm(given.petastorm, given.ranks)
        if processes:
            stack.callback(end, processes)
            contenders[THEIRS] = lambda: timing.petastorm(processes)
        return timing, race(contenders, given.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=37)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--petastorm", type=Path, default=PETASTORM, help="an interpreter that has Petastorm and torch")
    given = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="farandole-bench-"))
    try:
        with session(given.ranks) as spark:
            timing, seconds = measure(spark, given, scratch / "rows")
    finally:
        shutil.rmtree(scratch)
    lines = lines_of(timing, given.rounds)
    wrote = statistics.median(timing.seconds["writing"][DETOUR][-given.rounds :])
    what = f"{given.rows} rows x {given.columns} columns, {given.ranks} ranks, batches of {given.batch}"
    sys.stdout.write(f"writing Parquet took {wrote:.1f} s\n{table(what, lines)}\n")
    races = {f"{what}: seconds to the end of the first epoch": seconds}
    sys.stdout.write(f"{record('feed', races, ('farandole', 'pyarrow', 'pyspark', 'torch'), lines)}\n")


if __name__ == "__main__":
    main()
