"""A growing folder in an object store that fails in passing, slows down and cuts bodies: each row once all the same."""

import io
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("botocore")

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import Growing, GrowingLoader, StreamSource
from farandole.data.loading.arrivals import Seen
from farandole.data.stores.request_limiter import RequestLimiter
from farandole.errors import SourceError
from helpers.datasets import write_rows
from helpers.meeting import Meeting
from helpers.object_store import ObjectStore, Request

ROWS, MOMENTS = 6, (3, 0, 4, 1)  # rows of a file, and files that come at each look


class Growth:
    """Files that come into the store whenever it is looked at; as `until`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store, self._moments, self.files = store, list(MOMENTS), 0

    def __call__(self, paths: Any) -> bool:
        """Return whether `paths` are all files."""
        ended = not self._moments and len(paths) == self.files
        for _ in range(self._moments.pop(0) if self._moments else 0):
            body, first = io.BytesIO(), self.files * ROWS
            pq.write_table(pa.table({"row": range(first, first + ROWS)}), body, row_group_size=4)
            # Names are in no order of time. One assignment, as the store may be listing its objects.
            name = f"bucket/data/{(self.files * 7) % 10}-{self.files}.parquet"
            self._store.objects = {**self._store.objects, name: body.getvalue()}
            self.files += 1
        return ended


class Faults:
    """One of each three requests fails, each time in another way; no request fails twice on end."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()
        self._lock, self._failed, self._seen = threading.Lock(), False, 0

    def __call__(self, request: Request) -> int | str | None:
        with self._lock:
            self._seen += 1
            kinds: tuple[int | str, ...] = (503, "cut", "slow", "reset", 500)
            kind = kinds[self._seen // 3 % len(kinds)] if self._seen % 3 == 0 else None
            if kind == "cut" and request.method == "LIST":
                kind = 503
            if kind is not None:
                self.made[str(kind)] += 1
        if kind == "slow":
            time.sleep(0.05)
        return None if kind == "slow" else kind


def _in_ranks(size: int, body: Any) -> list[Any]:
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: body(rank, meeting.of(rank)), range(size)))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let retries wait for milliseconds."""
    quick = partial(RequestLimiter, attempts=6, first_pause=0.001)
    monkeypatch.setattr("farandole.data.stores.s3_client.RequestLimiter", quick)


def test_each_row_once_from_a_growing_folder_of_a_store_that_fails(tmp_path: Path, hasty: None) -> None:
    with ObjectStore.serving(tmp_path, latency=0.001) as store:
        until, faults = Growth(store), Faults()
        store.fault = faults
        seen: list[int] = []
        state: Any = None
        for size, most_steps in ((2, 3), (1, 4), (2, 999)):  # the first two are killed

            def read(rank: int, gather: Any) -> tuple[list[list[int]], Any]:
                growing = Growing(
                    "s3://bucket/data",
                    until=until,
                    poll=0,
                    patience=20,
                    options=store.options,
                )
                loader = GrowingLoader(growing, batch_size=2, rank=rank, size=size, gather=gather, state=state)  # noqa: B023
                steps = range(most_steps)  # noqa: B023
                batches = [batch["row"].tolist() for _, batch in zip(steps, loader, strict=False)]
                return batches, loader.state_dict()

            told = _in_ranks(size, read)
            assert len({len(batches) for batches, _ in told}) == 1, "steps differ"
            seen += [row for batches, _ in told for batch in batches for row in batch]
            state = told[0][1]
        assert sorted(seen) == list(range(until.files * ROWS))
        assert until.files == sum(MOMENTS)
    assert set(faults.made) == {"503", "cut", "slow", "reset", "500"}


def test_a_store_that_stays_down_ends_all_ranks(tmp_path: Path, hasty: None) -> None:
    with ObjectStore.serving(tmp_path) as store:
        until = Growth(store)
        until([])

        def read(rank: int, gather: Any) -> int:
            growing = Growing("s3://bucket/data", until=until, poll=0, patience=20, options=store.options)
            rows = 0
            with pytest.raises(SourceError, match="503"):
                for batch in GrowingLoader(growing, batch_size=1, rank=rank, size=2, gather=gather):
                    rows += batch.rows
                    store.fault = lambda request: 503
            return rows

        assert sum(_in_ranks(2, read)) <= 3 * ROWS


def _twice(faults: Callable[[Request], bool]) -> Callable[[Request], int | None]:
    """Fail the first two requests of these."""
    return lambda request: 503 if faults(request) and request.before < 2 else None


def test_a_marker_is_looked_for_again_when_the_store_fails_in_passing(tmp_path: Path, hasty: None) -> None:
    write_rows(tmp_path, [[ROWS]] * 2)
    (tmp_path / "_DONE").touch()
    with ObjectStore.serving(tmp_path) as store:
        growing = Growing("s3://bucket/data", until="_DONE", poll=0, options=store.options)
        store.fault = _twice(lambda request: True)
        rows = [row for batch in GrowingLoader(growing, batch_size=2) for row in batch["row"].tolist()]
        assert sorted(rows) == list(range(2 * ROWS))
        store.fault = lambda request: 503
        with pytest.raises(SourceError, match=r"s3://bucket/data/_DONE: .*status 503.* at attempt 6 of 6"):
            Growing("s3://bucket/data", until="_DONE", options=store.options).look(Seen())


def test_the_log_of_a_stream_is_read_again_when_the_store_fails_in_passing(tmp_path: Path, hasty: None) -> None:
    write_rows(tmp_path, [[ROWS]] * 3)
    (tmp_path / "_spark_metadata").mkdir()
    for batch in range(2):  # the third file is that of a batch that has failed
        facts = {"path": f"s3://bucket/data/part-{batch:03}.parquet", "modificationTime": 1, "action": "add"}
        facts["size"] = (tmp_path / f"part-{batch:03}.parquet").stat().st_size
        (tmp_path / "_spark_metadata" / str(batch)).write_text(f"v1\n{json.dumps(facts)}")
    (tmp_path / "_END").touch()
    with ObjectStore.serving(tmp_path) as store:
        store.fault = _twice(lambda request: True)
        growing = Growing("s3://bucket/data", format="stream", until="_END", poll=0, options=store.options)
        rows = [row for batch in GrowingLoader(growing, batch_size=2) for row in batch["row"].tolist()]
        assert sorted(rows) == list(range(2 * ROWS))
        store.fault = lambda request: 503 if request.key.endswith("_spark_metadata/1") else None
        with pytest.raises(SourceError, match=r"s3://bucket/data/_spark_metadata/1: .*status 503.* at attempt 6 of 6"):
            StreamSource("s3://bucket/data", options=store.options)
