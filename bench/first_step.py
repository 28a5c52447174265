"""Seconds until the first step when reading from a slow store, compared with downloading everything first.

    python bench/first_step.py [--mib 128] [--megabytes-per-second 40] [--latency 30] [--rounds 3]

A store in a process of its own delays each request and divides its bandwidth among all requests. It contains 128
Parquet files of one row group each, `--mib` MiB in all. farandole.data opens the files and reads the first batch of a
shuffled epoch. The other contender copies all files to the local disk with 16 threads and reads its first batch from
there with the same loader. "epoch" is the time until the last batch. The target is a first step five times sooner with
--mib 1024, which takes half a minute per contender and round; at the default size, opening the files is half of
farandole's time.
Writes bench/results/*-first_step.json.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from comparison import OURS
from race import Race, race, record, spread
from store import Store

from farandole.data import Loader, ParquetSource
from farandole.data.formats.row_groups import File
from farandole.data.stores.ranges import Span
from farandole.data.stores.s3_client import S3Client

FILES, WIDTH, BATCH = 128, 256, 256
URL = "s3://bucket/data"
PEER = "download all first"


def write(folder: Path, mib: int) -> int:
    """Write random rows, which do not compress; return their number."""
    random, rows = np.random.default_rng(0), (mib << 20) // FILES // (4 * WIDTH)
    for number in range(FILES):
        values = pa.array(random.random(rows * WIDTH, np.float32))
        table = pa.table({"pixels": pa.FixedSizeListArray.from_arrays(values, WIDTH)})
        pq.write_table(table, folder / f"part-{number:06}.parquet", compression="none", use_dictionary=False)
    return rows * FILES


def steps(source: ParquetSource, began: float, rows: int) -> tuple[float, float]:
    """Read an epoch; return the seconds from `began` until the first batch and until the last."""
    first, seen = 0.0, 0
    for batch in Loader(source, batch_size=BATCH, policy="join"):
        first = first or time.perf_counter() - began
        seen += batch.rows
    assert seen == rows, "rows were lost"
    return first, time.perf_counter() - began


def ours(store: Store, rows: int) -> tuple[float, float]:
    """Read from the store; return the seconds until the first batch and until the last."""
    began = time.perf_counter()
    return steps(ParquetSource(URL, store.options), began, rows)


def theirs(store: Store, rows: int) -> tuple[float, float]:
    """Copy all files, then read the copies; return the seconds until the first batch and until the last."""
    began = time.perf_counter()
    client = S3Client(URL, store.options)
    listed = client.listing(URL.removeprefix("s3://"), None) or []
    with tempfile.TemporaryDirectory() as folder:

        def copy(file: File) -> None:
            copied = client.fetch(file.path, Span(0, file.size), file.mark)
            (Path(folder) / Path(file.path).name).write_bytes(copied.data)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(copy, listed))
        return steps(ParquetSource(folder), began, rows)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--megabytes-per-second", type=float, default=40.0)
    parser.add_argument("--latency", type=float, default=30.0, help="milliseconds of each request")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    epochs: dict[str, list[float]] = {}

    def noting(name: str, read: Callable[[Store, int], tuple[float, float]]) -> Callable[[], float]:
        def measure() -> float:
            first, whole = read(store, rows)
            epochs.setdefault(name, []).append(whole)
            return first

        return measure

    with tempfile.TemporaryDirectory() as folder:
        rows = write(Path(folder), asked.mib)
        store = Store(Path(folder), asked.latency / 1000, asked.megabytes_per_second * 1e6)
        contenders = {OURS: noting(OURS, ours), PEER: noting(PEER, theirs)}
        first = race(contenders, asked.rounds)
        store.close()
    print(f"first step, {asked.mib} MiB\n{first.report()}")
    for name, seconds in epochs.items():
        print(f"  epoch, {name:<25} {spread(seconds)} s")
    races = {f"first step, {asked.mib} MiB": first, "epoch": Race(epochs)}
    print(record("first_step", races, ["pyarrow", "botocore"]))


if __name__ == "__main__":
    main()
