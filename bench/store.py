"""Requests and seconds that Parquet in a far object store costs.

    python bench/store.py [--files 200] [--latency 30] [--rounds 3] [--ranks 1 2 4]

A store in a process of its own counts requests and delays each by `--latency` milliseconds. Files have one small row
group each, so that requests are all that counts. farandole.data with 1, 2 and 4 ranks (threads here) stands beside
pyarrow.dataset, which reads everything once in one process, without steps, shares or checks. "in flight" is the most
that the store saw at once; "of ideal" is an epoch's seconds to requests times latency by requests in flight.
Writes bench/results/*-store.json.
"""

import argparse
import multiprocessing
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq
from comparison import OURS
from race import Race, record, spread

from farandole.data import Loader, ParquetSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from helpers.meeting import Meeting
from helpers.object_store import ObjectStore

ROWS = 100
PEER = "pyarrow.dataset"


def serve(folder: Path, latency: float, bytes_per_second: float, told: Connection) -> None:
    """Serve a folder, and tell the counts since the last question whenever one is asked."""
    with ObjectStore.serving(folder, latency=latency, bytes_per_second=bytes_per_second) as store:
        told.send((store.address, store.options))
        while told.recv():
            told.send((store.count, store.most_at_once))
            store.reset()


class Store:
    """The store's process."""

    def __init__(self, folder: Path, latency: float, bytes_per_second: float = 0.0) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(folder, latency, bytes_per_second, theirs))
        self._process.start()
        self.address, self.options = self._ours.recv()

    def counts(self) -> tuple[int, int]:
        """Requests, and the most at once, since the last call."""
        self._ours.send(True)
        counts: tuple[int, int] = self._ours.recv()
        return counts

    def close(self) -> None:
        """End the process."""
        self._ours.send(False)
        self._process.join()


def ours(store: Store, size: int, files: int) -> dict[str, float]:
    """Open the files and read two epochs with `size` ranks; give requests per file and seconds of the slowest rank."""
    meeting, marks = Meeting(size), threading.Barrier(size)
    found: dict[str, float] = {}

    def note(rank: int, name: str, began: float) -> None:
        marks.wait()
        if rank == 0:
            requests, at_once = store.counts()
            found[f"{name} s"] = time.perf_counter() - began
            found[f"{name} requests per file"] = requests / files
            found[f"{name} in flight"] = at_once
        marks.wait()

    def rank(number: int) -> int:
        gather: Any = meeting.of(number)
        marks.wait()
        began = time.perf_counter()
        source = ParquetSource("s3://bucket/data", store.options, gather=gather)
        note(number, "open", began)
        loader = Loader(source, batch_size=32, policy="join", rank=number, size=size, gather=gather)
        rows = 0
        for epoch in ("first epoch", "epoch"):
            began = time.perf_counter()
            for batch in loader:
                if number == 0 and epoch == "first epoch":
                    found.setdefault("first batch s", time.perf_counter() - began)
                rows += batch.rows
            note(number, epoch, began)
        return rows

    store.counts()
    with ThreadPoolExecutor(size) as pool:
        assert sum(pool.map(rank, range(size))) == 2 * files * ROWS, "rows were lost"
    return found


def peer(store: Store, files: int) -> dict[str, float]:
    """List and read the files once by pyarrow.dataset."""
    store.counts()
    began = time.perf_counter()
    fs = pyarrow.fs.S3FileSystem(
        access_key="a", secret_key="b", region="us-east-1", scheme="http", endpoint_override=store.address
    )
    rows = pyarrow.dataset.dataset("bucket/data", filesystem=fs, format="parquet").to_table().num_rows
    assert rows == files * ROWS, "rows were lost"
    requests, at_once = store.counts()
    return {
        "epoch s": time.perf_counter() - began,
        "epoch requests per file": requests / files,
        "epoch in flight": at_once,
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--latency", type=float, default=30.0, help="milliseconds of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    asked = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(asked.files):
            rows = pa.table({"row": np.arange(number * ROWS, (number + 1) * ROWS), "x": np.random.rand(ROWS)})
            pq.write_table(rows, Path(folder) / f"part-{number:06}.parquet")
        store = Store(Path(folder), asked.latency / 1000)
        for _ in range(asked.rounds):
            for name, measured in (
                *((f"{OURS}, {size} ranks", ours(store, size, asked.files)) for size in asked.ranks),
                (PEER, peer(store, asked.files)),
            ):
                ideal = measured["epoch requests per file"] * asked.files * asked.latency / 1000
                measured["epoch of ideal"] = measured["epoch s"] / (ideal / measured["epoch in flight"])
                for figure, value in measured.items():
                    results.setdefault(name, {}).setdefault(figure, []).append(value)
        store.close()
    for name, figures in results.items():
        print(name)
        for figure, values in figures.items():
            print(f"  {figure:<32} {spread(values)}")
    packages = ["pyarrow", "botocore", "fsspec"]
    print(record("store", {name: Race(figures, {}) for name, figures in results.items()}, packages))


if __name__ == "__main__":
    main()
