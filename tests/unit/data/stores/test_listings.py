"""Listings of a store by a job of many ranks: as many as by a job of one."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("botocore")
pytest.importorskip("aiohttp")

import pyarrow as pa

from farandole.data import Loader, ParquetSource, Reading
from farandole.data.formats import file_systems
from farandole.data.stores.s3_client import S3Client
from farandole.errors import SourceError
from helpers.datasets import write_rows
from helpers.meeting import Meeting
from helpers.object_store import ObjectStore, Request

FILES, ROWS = 30, 20


def write_delta(folder: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    for number in range(3):
        rows = pa.table({"row": range(number * 200, (number + 1) * 200)})
        deltalake.write_deltalake(str(folder), rows, mode="append")


@pytest.fixture(scope="module")
def with_deltalake(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Open a table once: deltalake keeps sockets for the rest of the process."""
    folder = tmp_path_factory.mktemp("delta")
    write_delta(folder)
    with ObjectStore.serving(folder) as store:
        ParquetSource("s3://bucket/data", store.options)


@pytest.mark.parametrize("size", [4, 64])
def test_the_number_of_listings_does_not_depend_on_the_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    write_rows(tmp_path, [[ROWS]] * FILES)
    opened, first, second = requests_of(size, tmp_path, monkeypatch)
    # A few looks for the marks of tables; then one listing for each epoch.
    assert opened["listing"] <= 12, opened
    assert (first["listing"], second["listing"]) == (opened["listing"] + 1, opened["listing"] + 2)


@pytest.mark.usefixtures("with_deltalake")
@pytest.mark.parametrize("size", [4, 64])
def test_one_rank_reads_the_log_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    write_delta(tmp_path)
    opened, first, second = requests_of(size, tmp_path, monkeypatch)
    assert opened["log"] <= 12, opened
    assert opened["listing"] <= 2, opened
    assert first == second == opened


def requests_of(size: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Read two epochs with `size` ranks; return the requests but for data after the opening and after each epoch."""
    seen: Counter[str] = Counter()

    def count(request: Request) -> None:
        # Everything but the data files: listings, and the files of a table's log.
        if not request.key.endswith(".parquet"):
            seen["log" if "_delta_log/" in request.key else "listing"] += 1

    with ObjectStore.serving(folder) as store:
        store.fault = count
        # The simulated ranks share one client, because making one takes a tenth of a second.
        client = S3Client("s3://bucket/data", store.options)
        monkeypatch.setattr(file_systems, "range_client", lambda *given, **options: client)
        meeting = Meeting(size)

        def read(rank: int) -> tuple[list[Any], list[dict[str, int]]]:
            gather, counts = meeting.of(rank), []
            source = ParquetSource("s3://bucket/data", store.options, gather=gather)
            gather(None)
            counts.append(dict(seen))
            reading = Reading(workers=1)
            loader = Loader(source, batch_size=4, policy="join", rank=rank, size=size, gather=gather, reading=reading)
            rows = []
            for _ in range(2):
                rows.append([row for batch in loader for row in batch["row"].tolist()])
                gather(None)
                counts.append(dict(seen))
                gather(None)
            return rows, counts

        with ThreadPoolExecutor(size) as pool:
            found = list(pool.map(read, range(size)))
    for epoch in range(2):
        assert sorted(row for rows, _ in found for row in rows[epoch]) == list(range(600))
    return found[0][1]


def test_all_ranks_are_told_of_a_file_that_vanished(tmp_path: Path) -> None:
    write_rows(tmp_path, [[ROWS]] * 8)
    with ObjectStore.serving(tmp_path) as store:
        meeting = Meeting(3)

        def read(rank: int) -> str:
            gather = meeting.of(rank)
            source = ParquetSource("s3://bucket/data", store.options, gather=gather)
            loader = Loader(source, batch_size=4, policy="join", rank=rank, size=3, gather=gather)
            gather(None)
            with suppress(KeyError):
                del store.objects["bucket/data/part-005.parquet"]
            gather(None)
            with pytest.raises(SourceError) as failed:
                next(iter(loader))
            return str(failed.value)

        with ThreadPoolExecutor(3) as pool:
            told = list(pool.map(read, range(3)))
    assert all("bucket/data/part-005.parquet" in each and "vanished" in each for each in told), told
