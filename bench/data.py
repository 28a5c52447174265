"""Rate of reading rows from Parquet, and time to the first batch.

    python bench/data.py [--rounds 5] [--batch 100] [--petastorm PYTHON]

farandole.data, Petastorm, a plain pyarrow loop (the limit), SPDL, Hugging Face's streaming, LitData, and torchdata's
StatefulDataLoader over that loop read in turns: narrow and wide rows, in file order and shuffled, as batches of NumPy
arrays (LitData's: of tensors). Each contender opens the data, reads one epoch on one rank, and ends. The last three
make or send single rows or batches, which is slow: they read 200 batches, and the time of an epoch is extrapolated from
them. "processor" is the processor time of an epoch on all cores; on a shared machine it is more reliable than elapsed
time. `python bench/peer_environment.py` installs these readers. Writes bench/results/*-data.json.

Petastorm 0.12.1 pins an old pyarrow, so it needs an environment of its own. Without one it is left out:

    python3.11 -m venv build/petastorm
    build/petastorm/bin/pip install petastorm==0.12.1 'pyarrow<11' 'numpy<2' 'pandas<2.2' 'setuptools<70'

If that environment also has torch, Petastorm's loader for torch is compared with ours: batches of tensors, shuffled in
a queue of a thousand batches. Without torch only its row groups are read, cut into slices.
"""

import argparse
import itertools
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch.utils.data
from comparison import OURS, Line, compare, table
from parquet_peers import Batch, as_array, hugging_face, index_litdata, installed, litdata_rows, spdl_groups
from peer_environment import NAMES, enter
from race import Race, race, record

from farandole.data import Loader, ParquetSource, Reading
from farandole.torch.data import TensorLoader

PETASTORM = Path("build/petastorm/bin/python")
# Petastorm's row groups cut into slices, which do not mix rows of row groups; or its loader for torch, which does.
PROGRAM = """
import importlib.util, sys, time, warnings
warnings.simplefilter("ignore")
from petastorm import make_batch_reader
has_torch = importlib.util.find_spec("torch") is not None
if has_torch:
    from petastorm.pytorch import BatchedDataLoader
print("ready", "torch" if has_torch else "alone", flush=True)

def sliced(reader, shuffle, batch):
    for group in reader:
        columns = group._asdict()
        for at in range(0, len(next(iter(columns.values()))), batch):
            yield {name: values[at : at + batch] for name, values in columns.items()}

def loaded(reader, shuffle, batch):
    return BatchedDataLoader(reader, batch, shuffling_queue_capacity=1000 * batch if shuffle else 0)

for line in sys.stdin:
    url, how, shuffle, batch = line.split()
    shuffle, batch = shuffle == "True", int(batch)
    rows, first, worked, began = 0, None, time.process_time(), time.perf_counter()
    asked = dict(num_epochs=1, workers_count=2, shuffle_rows=shuffle, shuffle_row_groups=shuffle)
    with make_batch_reader(url, **asked) as reader:
        for made in (loaded if how == "tensors" else sliced)(reader, shuffle, batch):
            first = first or time.perf_counter() - began
            rows += len(made["label"])
    print(rows, first, time.process_time() - worked, time.perf_counter() - began, flush=True)
"""

PETASTORM_LOADER = "petastorm's loader"
HUGGING_FACE = "Hugging Face streaming"
PATIENCE = 600.0  # seconds until Petastorm's process answers


@dataclass(frozen=True)
class Task:
    """A data set and the way to read it."""

    folder: Path
    rows: int
    shuffle: bool
    batch: int


class Timing:
    """Contenders for one task. Each returns its seconds for an epoch; `firsts` holds the seconds to the first batch."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.firsts: dict[str, list[float]] = {}
        self.works: dict[str, list[float]] = {}  # processor time of all threads

    def loop(self, name: str, batches: Callable[[Task], Iterator[object]]) -> Callable[[], float]:
        def measure() -> float:
            count, first, worked, began = 0, 0.0, time.process_time(), time.perf_counter()
            for _ in batches(self.task):
                first = first or time.perf_counter() - began
                count += 1
            taken = time.perf_counter() - began
            assert count >= self.task.rows // self.task.batch, f"{name} has lost rows"
            self.firsts.setdefault(name, []).append(first)
            self.works.setdefault(name, []).append(time.process_time() - worked)
            return taken

        return measure

    def part(self, name: str, batches: Callable[[Task], Iterator[object]], most: int) -> Callable[[], float]:
        """Return a contender that reads `most` batches after the first and extrapolates the time of the epoch."""

        def measure() -> float:
            began = time.perf_counter()
            made = batches(self.task)
            next(made)
            first = time.perf_counter() - began
            count = sum(1 for _ in itertools.islice(made, most))
            after = time.perf_counter() - began - first
            self.firsts.setdefault(name, []).append(first)
            return first + after * (self.task.rows / self.task.batch - 1) / count

        return measure

    def petastorm(self, name: str, process: "subprocess.Popen[str]", how: str = "slices") -> Callable[[], float]:
        def measure() -> float:
            assert process.stdin is not None
            process.stdin.write(f"{self.task.folder.as_uri()} {how} {self.task.shuffle} {self.task.batch}\n")
            process.stdin.flush()
            rows, first, worked, taken = answer(process).split()
            assert int(rows) == self.task.rows, f"{name} has lost rows"
            self.firsts.setdefault(name, []).append(float(first))
            self.works.setdefault(name, []).append(float(worked))
            return float(taken)

        return measure


def ours(task: Task) -> Iterator[object]:
    source = ParquetSource(str(task.folder))
    return iter(Loader(source, batch_size=task.batch, policy="join", reading=Reading(shuffle=task.shuffle)))


def our_tensors(task: Task) -> Iterator[object]:
    source = ParquetSource(str(task.folder))
    return iter(
        TensorLoader(Loader(source, batch_size=task.batch, policy="join", reading=Reading(shuffle=task.shuffle)))
    )


def plain(task: Task, part: int = 0, parts: int = 1) -> Iterator[Batch]:
    """Yield batches read with pyarrow alone: one row group at a time, or four row groups shuffled together."""
    files = [pq.ParquetFile(path) for path in sorted(task.folder.glob("*.parquet"))]
    groups = [(file, number) for file in files for number in range(file.num_row_groups)][part::parts]
    random = np.random.default_rng(0)
    window = 1
    if task.shuffle:
        groups, window = [groups[place] for place in random.permutation(len(groups))], 4
    for at in range(0, len(groups), window):
        whole = pa.concat_tables([file.read_row_group(number) for file, number in groups[at : at + window]])
        if task.shuffle:
            order = random.permutation(whole.num_rows)
            columns = {name: as_array(whole[name])[order] for name in whole.column_names}
        else:
            columns = {name: as_array(whole[name]) for name in whole.column_names}
        for first in range(0, whole.num_rows, task.batch):
            yield {name: values[first : first + task.batch] for name, values in columns.items()}


class PlainDataset(torch.utils.data.IterableDataset[Batch]):
    """The plain loop, with a part of the row groups for each worker."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        return plain(self.task, worker.id, worker.num_workers)


def stateful(task: Task) -> Iterator[object]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return iter(StatefulDataLoader(PlainDataset(task), batch_size=None, num_workers=2, collate_fn=unchanged))


Found = dict[str, tuple[Timing, Race]]


def unchanged(batch: Batch) -> Batch:
    return batch


def write_narrow(folder: Path, rows: int) -> None:
    random = np.random.default_rng(0)
    for file in range(4):
        count = rows // 4
        columns = {
            "id": np.arange(file * count, (file + 1) * count),
            "x": random.normal(size=count).astype(np.float32),
            "y": random.normal(size=count),
            "label": random.integers(0, 10, count).astype(np.int32),
        }
        pq.write_table(pa.table(columns), folder / f"{file}.parquet", row_group_size=25_000)


def write_wide(folder: Path, rows: int) -> None:
    random = np.random.default_rng(0)
    for file in range(4):
        count = rows // 4
        pixels = pa.array(random.normal(size=count * 784).astype(np.float32))
        columns = {
            "pixels": pa.ListArray.from_arrays(np.arange(0, count * 784 + 1, 784, np.int32), pixels),
            "label": random.integers(0, 10, count).astype(np.int32),
        }
        pq.write_table(pa.table(columns), folder / f"{file}.parquet", row_group_size=625)


def lines_of(what: str, timing: Timing, seconds: Race) -> list[Line]:
    """Return the comparisons of epochs (with targets), processor times and times to the first batch."""
    readers = dict.fromkeys(("SPDL", HUGGING_FACE, "LitData", "torchdata"), 1.0)
    musts = {"pyarrow": 0.8, **readers, **({PETASTORM_LOADER: 2.0} if timing.task.shuffle else {})}
    rounds = len(seconds.seconds[OURS])
    lines = []
    for measure, times in (("epoch", seconds.seconds), ("processor", timing.works), ("first batch", timing.firsts)):
        # Leave out the first round, which warms caches.
        counted = Race({name: values[-rounds:] for name, values in times.items()})
        lines += compare(f"{what}, {measure}", counted, musts if measure == "epoch" else {})
    return lines


def readers_of(timing: Timing) -> dict[str, Callable[[], float]]:
    """Return the contenders of `peer_environment` that are installed."""
    there, task, found = installed(), timing.task, {}
    asked = {"shuffle": task.shuffle, "batch": task.batch}
    if "spdl" in there:
        found["SPDL"] = timing.loop("SPDL", lambda task: spdl_groups(task.folder, **asked))
    if "datasets" in there:
        found[HUGGING_FACE] = timing.part(HUGGING_FACE, lambda task: hugging_face(task.folder, **asked), 200)
    if "litdata" in there:
        index = index_litdata(task.folder)
        found["LitData"] = timing.part("LitData", lambda task: litdata_rows(task.folder, index, **asked), 200)
    if "torchdata" in there:
        found["torchdata"] = timing.part("torchdata", stateful, 200)
    return found


def measure_task(what: str, task: Task, process: "subprocess.Popen[str] | None", tensors: bool, rounds: int) -> Found:
    """Run the races of one task."""
    timing = Timing(task)
    contenders = {OURS: timing.loop(OURS, ours), "pyarrow": timing.loop("pyarrow", plain)}
    if process is not None:
        contenders["petastorm's groups"] = timing.petastorm("petastorm's groups", process)
    contenders |= readers_of(timing)
    found: Found = {what: (timing, race(contenders, rounds))}
    if process is not None and tensors:
        timing = Timing(task)
        contenders = {
            OURS: timing.loop(OURS, our_tensors),
            PETASTORM_LOADER: timing.petastorm(PETASTORM_LOADER, process, "tensors"),
        }
        found[f"{what}, tensors"] = (timing, race(contenders, rounds))
    return found


def start_petastorm(python: Path) -> "tuple[subprocess.Popen[str] | None, bool]":
    """Start Petastorm's process; return it and whether its environment has torch. Without Petastorm: None, False."""
    if not python.exists():
        sys.stdout.write(f"Petastorm is left out: there is no {python}\n")
        return None, False
    # That environment may use this one's torch, whose plug-ins it cannot load.
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    process = subprocess.Popen(
        [python, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    return process, answer(process) == "ready torch\n"


def answer(process: "subprocess.Popen[str]") -> str:
    """Return the next line from Petastorm's process. Kills it and raises `TimeoutError` if none comes."""
    assert process.stdout is not None
    # The process prints one line for each request, so no line waits in the buffer of `stdout`.
    if not select.select([process.stdout], [], [], PATIENCE)[0]:
        process.kill()
        raise TimeoutError(f"Petastorm's process printed nothing for {PATIENCE:g} s")
    return process.stdout.readline()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--petastorm", type=Path, default=PETASTORM, help="an interpreter that has Petastorm 0.12.1")
    given = parser.parse_args()
    process, tensors = start_petastorm(given.petastorm)
    found: Found = {}
    try:
        with tempfile.TemporaryDirectory(prefix="farandole-bench-") as scratch:
            for kind, write, rows in (("narrow", write_narrow, 2_000_000), ("wide", write_wide, 20_000)):
                folder = Path(scratch, kind)
                folder.mkdir()
                write(folder, rows)
                for shuffle in (True, False):
                    what = f"{kind}, {'shuffled' if shuffle else 'in order'}"
                    task = Task(folder, rows, shuffle, given.batch)
                    found |= measure_task(what, task, process, tensors, given.rounds)
    finally:
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)
    lines = [line for what, (timing, seconds) in found.items() for line in lines_of(what, timing, seconds)]
    for what, (timing, seconds) in found.items():
        rates = {name: timing.task.rows / statistics.median(each) / 1e6 for name, each in seconds.seconds.items()}
        listed = ", ".join(f"{name} {rate:.3g}" for name, rate in rates.items())
        sys.stdout.write(f"{what}: million rows/s {listed}\n")
    sys.stdout.write(f"{table('rows out of Parquet', lines)}\n")
    races = {what: seconds for what, (_, seconds) in found.items()}
    packages = ("farandole", "numpy", "pyarrow", "torch", *NAMES)
    sys.stdout.write(f"{record('data', races, packages, lines)}\n")


if __name__ == "__main__":
    enter()
    main()
