"""Requests and seconds of reading Parquet from a distant object store.

    python bench/store.py [--files 400] [--latency 30] [--rounds 3] [--ranks 1 2 4]

A store in a process of its own counts requests and delays each by `--latency` milliseconds. It answers on one thread,
because it shares the cores with its clients; its processor time is printed beside theirs. Each file has one small row
group, so that the time depends on requests only. farandole.data with 1, 2 and 4 ranks (processes, as in any job) is
compared with pyarrow.dataset, which reads everything once in one process without steps, shares or checks, and with
Petastorm's way: ten threads, each of which opens a file again for each of its row groups.

"in flight" is the greatest number of requests at once. "of ideal" is the ratio of an epoch's seconds to the ideal time,
requests x latency / requests in flight. "requests alone" are threads that only send requests; their "of ideal" shows
the best ratio of this machine: four ranks with 30 ms send 2000 requests a second. "share of the cores" shows whether
the processors or the latency limit an epoch. The figures of an epoch are medians of those after the first. In one of
the first few, each rank loses 0.07 s to a run of Python's garbage collector over all that was imported; "worst epoch"
has it. Writes bench/results/*-store.json.
"""

import argparse
import http.client
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq
from comparison import OURS
from race import Race, record, spread

import farandole
from farandole.data import Loader, ParquetSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from quick_store import QuickStore

from helpers.object_store import ObjectStore

ROWS = 100
EPOCHS = 9
PEER, PETASTORM = "pyarrow.dataset", "Petastorm's way"
KEY = b"bench"


def serve(folder: Path, latency: float, bytes_per_second: float, pipe: Connection) -> None:
    """Serve a folder until `Store.close`. Send the addresses through `pipe`; `counts_at` returns the counters."""
    if bytes_per_second:
        with ObjectStore.serving(folder, latency=latency, bytes_per_second=bytes_per_second) as store:
            _serve_counts(store, pipe)
        return
    quick = QuickStore(folder, "bucket/data", latency)
    thread = threading.Thread(target=quick.serve)
    thread.start()
    _serve_counts(quick, pipe)
    quick.closing = True
    thread.join()


def _serve_counts(store: ObjectStore | QuickStore, pipe: Connection) -> None:
    with Listener(("127.0.0.1", 0), backlog=16, authkey=KEY) as listener:
        pipe.send((store.address, store.options, listener.address))
        spent = 0.0
        while True:
            with listener.accept() as asked:
                if not asked.recv():
                    return
                so_far = time.process_time()
                asked.send((store.count, store.most_at_once, so_far - spent))
                store.reset()
                spent = so_far


def counts_at(place: tuple[str, int]) -> tuple[int, int, float]:
    """Return the requests, the most at once, and the store's processor seconds since the last call of any process."""
    with Client(place, authkey=KEY) as asking:
        asking.send(True)
        counts: tuple[int, int, float] = asking.recv()
        return counts


class Store:
    """Handle of the store's process."""

    def __init__(self, folder: Path, latency: float, bytes_per_second: float = 0.0) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(folder, latency, bytes_per_second, theirs))
        self._process.start()
        self.address, self.options, self.place = ours.recv()

    def counts(self) -> tuple[int, int, float]:
        """Return the counters; see `counts_at`."""
        return counts_at(self.place)

    def close(self) -> None:
        """End the process and wait for it."""
        with Client(self.place, authkey=KEY) as asking:
            asking.send(False)
        self._process.join()


def now() -> tuple[float, float]:
    """Return the time and this process's processor seconds."""
    return time.perf_counter(), time.process_time()


def figures(began: float, spent: float, place: tuple[str, int], files: int) -> dict[str, float]:
    """Return the figures of a reading that began at `began`; `spent` are the clients' processor seconds."""
    seconds = time.perf_counter() - began
    requests, at_once, of_store = counts_at(place)
    return {
        "s": seconds,
        "requests per file": requests / files,
        "in flight": at_once,
        "ms of processor per request": 1000 * spent / requests,
        "ms of the store's processor per request": 1000 * of_store / requests,
        "share of the cores": (spent + of_store) / (seconds * len(os.sched_getaffinity(0))),
    }


def rank_of_job(options: dict[str, object], place: tuple[str, int], files: int) -> tuple[dict[str, float], int]:
    """Open the files and read `EPOCHS` epochs as a rank; return the figures of all ranks and the rows of this one."""
    import farandole.numpy as hvd

    hvd.init()
    found: dict[str, list[float]] = {}

    def note(name: str, began: tuple[float, float]) -> None:
        spent = hvd.allgather_object(time.process_time() - began[1])
        if hvd.rank() == 0:
            for what, value in figures(began[0], sum(spent), place, files).items():
                found.setdefault(f"{name} {what}", []).append(value)
        hvd.allgather_object(None)

    began = now()
    source = ParquetSource("s3://bucket/data", options, gather=hvd.allgather_object)
    note("open", began)
    loader = Loader(source, batch_size=32, policy="join", rank=hvd.rank(), size=hvd.size(), gather=hvd.allgather_object)
    rows = 0
    for epoch in ("first epoch", *["epoch"] * (EPOCHS - 1)):
        began = now()
        for batch in loader:
            if epoch == "first epoch":
                found.setdefault("first batch s", [time.perf_counter() - began[0]])
            rows += batch.rows
        note(epoch, began)
    if hvd.rank() == 0:
        found["worst epoch s"] = [max(found["epoch s"])]
    return {name: statistics.median(values) for name, values in found.items()}, rows


def ours(store: Store, size: int, files: int) -> dict[str, float]:
    """Open the files and read `EPOCHS` epochs with `size` ranks; return the figures."""
    store.counts()
    results = farandole.run(
        rank_of_job, (store.options, store.place, files), num_proc=size, env={"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert sum(rows for _, rows in results) == EPOCHS * files * ROWS, "rows were lost"
    return results[0][0]


def alone(store: Store, files: int) -> dict[str, float]:
    """Request each file's first bytes with 16 threads, as many as a rank has requests in flight; return the figures."""
    kept = threading.local()

    def ask(number: int) -> int:
        if not hasattr(kept, "connection"):
            kept.connection = http.client.HTTPConnection(store.address)
        kept.connection.request("GET", f"/bucket/data/part-{number:06}.parquet", headers={"Range": "bytes=0-99"})
        return len(kept.connection.getresponse().read())

    store.counts()
    began = now()
    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(ask, range(files))) == 100 * files, "bytes were lost"
    return _epoch(store, began, files)


def petastorms_way(store: Store, files: int) -> dict[str, float]:
    """Read each row group once as Petastorm's workers do, opening its file; return the figures, without the listing."""
    fs = _arrow(store)

    def read(number: int) -> int:
        with pq.ParquetFile(fs.open_input_file(f"bucket/data/part-{number:06}.parquet")) as opened:
            return int(opened.read_row_group(0).num_rows)

    store.counts()
    began = now()
    with ThreadPoolExecutor(10) as pool:
        assert sum(pool.map(read, range(files))) == files * ROWS, "rows were lost"
    return _epoch(store, began, files)


def peer(store: Store, files: int) -> dict[str, float]:
    """List and read the files once with pyarrow.dataset; return the figures."""
    store.counts()
    began = now()
    rows = pyarrow.dataset.dataset("bucket/data", filesystem=_arrow(store), format="parquet").to_table().num_rows
    assert rows == files * ROWS, "rows were lost"
    return _epoch(store, began, files)


def _arrow(store: Store) -> pyarrow.fs.S3FileSystem:
    return pyarrow.fs.S3FileSystem(
        access_key="a", secret_key="b", region="us-east-1", scheme="http", endpoint_override=store.address
    )


def _epoch(store: Store, began: tuple[float, float], files: int) -> dict[str, float]:
    found = figures(began[0], time.process_time() - began[1], store.place, files)
    return {f"epoch {name}": value for name, value in found.items()}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--files", type=int, default=400)
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
                (PETASTORM, petastorms_way(store, asked.files)),
                ("requests alone", alone(store, asked.files)),
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
    print(record("store", {name: Race(figures) for name, figures in results.items()}, packages))


if __name__ == "__main__":
    main()
