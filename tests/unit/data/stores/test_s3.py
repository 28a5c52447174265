"""Files of object stores and web servers: few requests, repeated when they fail, and never rows of a changed file."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("botocore")
pytest.importorskip("aiohttp")

import botocore.session
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import CachedSource, Loader, ParquetSource, Reading, files
from farandole.data.formats.row_groups import RowGroup
from farandole.data.stores.ranges import Span, coalesce
from farandole.data.stores.request_limiter import LEAST_IN_FLIGHT, MOST_IN_FLIGHT, PassingFailure, RequestLimiter
from farandole.data.stores.s3_client import S3Client
from farandole.errors import SourceError
from helpers.datasets import write_rows
from helpers.meeting import Meeting
from helpers.object_store import ObjectStore, Request

FILES, ROWS = 30, 5
IN_FILE_ORDER = Reading(shuffle=False, window=1, lanes=1, workers=0, ahead=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("far")
    write_rows(made, [[ROWS]] * FILES)
    return made


@contextmanager
def store_of(
    folder: Path, kind: str, latency: float = 0.0
) -> Iterator[tuple[ObjectStore, Callable[..., ParquetSource]]]:
    """Serve a folder, and give a function that opens it."""
    with ObjectStore.serving(folder, latency=latency) as store:
        urls = "s3://bucket/data" if kind == "s3" else store.urls()
        options = store.options if kind == "s3" else None
        yield store, lambda **how: _hasty(ParquetSource(urls, options, **how))


def _hasty(source: ParquetSource) -> ParquetSource:
    """Let retries wait for milliseconds."""
    client = source._source._files.client  # type: ignore[union-attr]
    assert client is not None
    client.limiter = RequestLimiter(attempts=4, first_pause=0.001)
    return source


def in_ranks(size: int, body: Callable[[int, Any], Any]) -> list[Any]:
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: body(rank, meeting.of(rank)), range(size)))


@pytest.mark.parametrize("kind", ["s3", "http"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_request_per_file_opens_it_and_a_request_reads_its_row_group(tmp_path: Path, kind: str, size: int) -> None:
    count = 200
    write_rows(tmp_path, [[ROWS]] * count)
    with store_of(tmp_path, kind) as (store, open_it):
        opened = in_ranks(size, lambda rank, gather: open_it(gather=gather))
        assert store.count <= 1.1 * count, store.requests
        store.reset()

        def read(rank: int, gather: Any) -> list[int]:
            loader = Loader(opened[rank], batch_size=16, policy="join", rank=rank, size=size, gather=gather)
            return [row for batch in loader for row in batch["row"].tolist()]

        rows = [row for each in in_ranks(size, read) for row in each]
        assert sorted(rows) == list(range(count * ROWS))
        assert store.count <= 1.1 * count, store.requests


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_the_first_step_comes_before_most_row_groups(tmp_path: Path, kind: str) -> None:
    """The store answers for a quarter of a rank's row groups, and for the others only after the rank's first batch."""
    count, stepped, asked = 64, threading.Event(), threading.Semaphore(8)
    write_rows(tmp_path, [[ROWS]] * count)

    def wait(request: Request) -> None:
        if request.method == "GET" and not asked.acquire(blocking=False):
            assert stepped.wait(5), "the first batch waits for more"

    with store_of(tmp_path, kind) as (store, open_it):
        source = open_it()
        store.reset()
        store.fault = wait
        reading = Reading(lanes=4, window=ROWS, ahead=1, workers=2)
        batches = iter(Loader(source, batch_size=2, policy="join", rank=0, size=2, reading=reading))
        rows = next(batches).rows
        stepped.set()
        assert rows + sum(batch.rows for batch in batches) == count * ROWS / 2
        assert store.count <= 1.1 * count / 2 + 2, store.requests


def sometimes(request: Request) -> int | str | None:
    """Fail in three ways, each object once or twice."""
    if request.before == 1 and request.key.endswith(("3.parquet", "bucket")):
        return 503
    if request.before % 2 == 0 and request.key.endswith("7.parquet"):
        return "reset"
    return "cut" if request.before == 2 and request.key.endswith("5.parquet") else None


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_a_request_that_fails_in_passing_is_repeated(folder: Path, kind: str) -> None:
    with store_of(folder, kind) as (store, open_it):
        source = open_it()
        store.fault = sometimes
        for _ in range(2):
            rows = [row for batch in Loader(source, batch_size=16, policy="join") for row in batch["row"].tolist()]
            assert sorted(rows) == list(range(FILES * ROWS))


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_an_error_for_good_names_url_attempt_and_status(folder: Path, kind: str) -> None:
    with store_of(folder, kind) as (store, open_it):
        loader = Loader(open_it(), batch_size=16, policy="join", reading=IN_FILE_ORDER)
        batches = iter(loader)
        next(batches)
        store.fault = lambda request: 503 if request.key.endswith("part-025.parquet") else None
        place = "s3://bucket" if kind == "s3" else f"http://{store.address}/bucket"
        with pytest.raises(
            SourceError, match=rf"{place}/data/part-025.parquet: .*status 503.* at attempt 4 of 4"
        ) as told:
            list(batches)
        assert "secretsecret" not in str(told.value)
        assert loader.epoch == 0
        store.fault = lambda request: None
        # The epoch goes on where it broke off.
        position = loader.state_dict()["visited"]
        rest = [row for batch in loader for row in batch["row"].tolist()]
        assert rest == list(range(position, FILES * ROWS))


@pytest.mark.parametrize("kind", ["s3", "http"])
@pytest.mark.parametrize("short", ["range", "closed"])
def test_the_rest_of_an_answer_shorter_than_asked_is_asked_for(tmp_path: Path, kind: str, short: str) -> None:
    write_rows(tmp_path, [[2000, 2000]])
    with store_of(tmp_path, kind) as (store, open_it):
        store.short = short
        loader = Loader(open_it(), batch_size=500, policy="join")
        assert sorted(row for batch in loader for row in batch["row"].tolist()) == list(range(4000))


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_an_answer_that_stays_short_names_file_and_bytes(folder: Path, kind: str) -> None:
    with store_of(folder, kind) as (store, open_it):
        source = open_it()
        store.short = "empty"
        wanted = r"part-003.parquet: .*: \d+ bytes from \d+ on were requested, and 0 from \d+ on have come at attempt 4"
        with pytest.raises(SourceError, match=wanted):
            source.read(source.row_groups[3], ["row"])


@pytest.mark.parametrize(("kind", "hidden"), [("s3", "ETag"), ("s3", "Content-Range"), ("http", "Content-Range")])
def test_an_answer_without_a_needed_header_is_told(folder: Path, kind: str, hidden: str) -> None:
    with store_of(folder, kind) as (store, open_it):
        source = open_it()
        store.hidden = (hidden,)
        told = rf"part-003.parquet: cannot be (read|looked at): the answer has no (?i:{hidden})"
        with pytest.raises(SourceError, match=told):
            source.read(source.row_groups[3], ["row"])


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_an_object_that_is_closed_to_us_is_no_raw_error(folder: Path, kind: str) -> None:
    with store_of(folder, kind) as (store, open_it):
        source = open_it()
        store.fault = lambda request: 403 if request.key.endswith("3.parquet") else None
        with pytest.raises(SourceError, match=r"part-003.parquet: cannot be (read|looked at): .*403") as told:
            source.read(source.row_groups[3], ["row"])
        assert "secretsecret" not in str(told.value)


@pytest.mark.parametrize("kind", ["s3", "http"])
@pytest.mark.parametrize("how", ["not at all", "byte by byte"])
def test_an_answer_that_does_not_come_is_asked_for_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: str
) -> None:
    monkeypatch.setattr("farandole.data.stores.s3_client._READ_TIMEOUT", 0.25)
    monkeypatch.setattr("farandole.data.stores.web_client._TIMEOUT", 0.25)
    with store_of(folder, kind) as (store, open_it):
        source = open_it()
        slow: set[str] = set()

        def hang(request: Request) -> str | None:
            if not request.key.endswith("7.parquet"):
                return None
            slow.add(request.key)
            if how == "byte by byte":
                return "trickle"
            time.sleep(0.6)
            return None

        store.fault = lambda request: None if request.key in slow else hang(request)
        rows = [row for batch in Loader(source, batch_size=16, policy="join") for row in batch["row"].tolist()]
        assert sorted(rows) == list(range(FILES * ROWS))
        assert len(slow) == 3
        store.fault = hang
        with pytest.raises(SourceError, match=rf"{kind}://.*7.parquet: .*imeout.* at attempt 4 of 4"):
            list(Loader(source, batch_size=16, policy="join"))


@pytest.mark.parametrize("kind", ["s3", "http"])
@pytest.mark.parametrize("change", ["changed", "vanished"])
def test_an_object_that_does_not_stay_ends_the_epoch(tmp_path: Path, kind: str, change: str) -> None:
    write_rows(tmp_path, [[10, 10]] * 3)
    with store_of(tmp_path, kind) as (store, open_it):
        loaders = [
            Loader(open_it(), batch_size=1, policy="drop", rank=rank, size=2, reading=IN_FILE_ORDER)
            for rank in range(2)
        ]
        batches = [iter(loader) for loader in loaders]
        for each in batches:
            next(each)
        spoiled = store.objects["bucket/data/part-001.parquet"]
        if change == "changed":  # of the same size
            store.objects["bucket/data/part-001.parquet"] = spoiled[:-1] + b"?"
        else:
            del store.objects["bucket/data/part-001.parquet"]
        text = "has changed while it was being read" if change == "changed" else "has vanished since it was listed"
        for each, loader in zip(batches, loaders, strict=True):
            with pytest.raises(SourceError, match=f"part-001.parquet: {text}"):
                list(each)
            assert loader.epoch == 0
            assert loader.state_dict()["visited"] < 60


def test_a_page_of_a_web_server_in_place_of_a_file_is_no_changed_file(tmp_path: Path) -> None:
    (tmp_path / "part-000.parquet").write_text("<html>Log in</html>")
    with (
        store_of(tmp_path, "http") as (_, open_it),
        pytest.raises(SourceError, match=r"part-000.parquet: cannot be read"),
    ):
        open_it()


def test_a_cache_sees_that_a_web_servers_file_has_changed(tmp_path: Path) -> None:
    write_rows(tmp_path / "far", [[4]] * 3)
    with store_of(tmp_path / "far", "http") as (store, open_it):
        loader = Loader(CachedSource(open_it(), tmp_path / "cache", 1 << 20), batch_size=2, policy="join")
        list(loader)
        store.objects["bucket/data/part-001.parquet"] += b"?"
        with pytest.raises(SourceError, match=r"part-001.parquet: has changed"):
            list(loader)


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_far_samples_take_a_request_each(tmp_path: Path, kind: str) -> None:
    for number in range(60):
        (tmp_path / f"{number:02}.bin").write_bytes(b"%d" % number)
    with ObjectStore.serving(tmp_path) as store:
        urls = "s3://bucket/data" if kind == "s3" else store.urls()
        options = store.options if kind == "s3" else None

        def read(rank: int, gather: Any) -> list[int]:
            how: dict[str, Any] = {"decode": lambda sample: {"row": int(sample["data"])}, "options": options}
            source = files(urls, format="bytes", gather=gather, **how)
            loader = Loader(source, batch_size=4, policy="join", rank=rank, size=2, gather=gather)
            return [row for _ in range(3) for batch in loader for row in batch["row"].tolist()]

        rows = [row for each in in_ranks(2, read) for row in each]
        assert sorted(rows) == sorted([*range(60)] * 3)
        assert store.requests["GET"] == 3 * 60 + 2  # and the first sample on each rank
        assert store.count <= 3 * 60 + 10, store.requests


def test_the_first_requests_do_not_wait_for_the_listing_of_the_check(folder: Path) -> None:
    with store_of(folder, "s3") as (store, open_it):
        loader = Loader(open_it(), batch_size=FILES * ROWS, policy="join")
        store.reset()
        read = threading.Event()

        def fault(request: Request) -> None:
            if request.method == "GET":
                read.set()
            else:
                assert read.wait(20), "nothing is read before the listing is there"

        store.fault = fault
        assert sum(batch.rows for batch in loader) == FILES * ROWS
        assert store.requests["LIST"] == 1


def test_footers_of_old_writers_tell_too_few_bytes(tmp_path: Path) -> None:
    write_rows(tmp_path, [[ROWS]])
    (path,) = tmp_path.glob("*.parquet")
    data = path.read_bytes()
    writer = pq.read_metadata(path).created_by.encode()
    path.write_bytes(data.replace(writer, b"parquet-mr version 1.2.8".ljust(len(writer))))
    with store_of(tmp_path, "s3") as (store, open_it):
        source = open_it()
        store.reset()
        assert source.read(source.row_groups[0], ["row"])["row"].to_pylist() == list(range(ROWS))
        assert store.requests == {"GET": 2}  # the columns, and what Arrow wants beyond them


def test_far_apart_columns_take_a_request_each_and_near_ones_share_one(tmp_path: Path) -> None:
    wide = {f"c{number}": np.random.default_rng(number).random(200_000) for number in range(4)}  # 1.6 MB each
    pq.write_table(
        pa.table({"a": [1] * 200_000, "b": [2] * 200_000, **wide, "z": [3] * 200_000}), tmp_path / "x.parquet"
    )
    with store_of(tmp_path, "s3") as (store, open_it):
        source = open_it()
        for columns, requests in ((["a", "b"], 1), (["a", "z"], 2), (["c0", "c1", "c2"], 1)):
            store.reset()
            table = source.read(source.row_groups[0], columns)
            assert (table.num_rows, table.column_names) == (200_000, columns)
            assert store.requests == {"GET": requests}


@pytest.mark.parametrize("columns", [["a.b"], ["a"], [""], ["deep"], ["a.b", "a", "", "deep"]])
def test_columns_are_fetched_whatever_their_names(tmp_path: Path, columns: list[str]) -> None:
    rows = {
        "a.b": [1, 2],
        "a": [3, 4],
        "": [5, 6],
        "deep": [{"b": {"c": [7], "d": "x"}}, {"b": {"c": [8, 9], "d": "y"}}],
    }
    pq.write_table(pa.table(rows), tmp_path / "x.parquet")
    with store_of(tmp_path, "s3") as (_, open_it):
        source = open_it()
        assert source.read(source.row_groups[0], columns).to_pydict() == {name: rows[name] for name in columns}
        assert source.nbytes(columns) > 0


def test_files_with_columns_in_another_order_are_fetched_where_theirs_lie(tmp_path: Path) -> None:
    long = list(range(50_000))
    pq.write_table(pa.table({"a": [1] * 50_000, "long": long, "z": [3] * 50_000}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"long": long, "z": [5] * 50_000, "a": [4] * 50_000}), tmp_path / "2.parquet")
    with store_of(tmp_path, "s3") as (store, open_it):
        source = open_it()
        store.reset()
        for columns in (["a"], ["z"], ["a", "z"], ["long"]):
            for group, a, z in zip(source.row_groups, (1, 4), (3, 5), strict=True):
                values = {"a": a, "z": z}
                table = source.read(group, columns)
                assert [table[name][7].as_py() for name in columns] == [values.get(name, 7) for name in columns]
        assert store.requests == {"GET": 8}


def test_lists_folders_and_pages_name_the_same_files(folder: Path) -> None:
    with ObjectStore.serving(folder) as store:
        store.page = 7
        store.objects["bucket/data/_notes/x.parquet"] = b"no data"
        store.objects["bucket/data/x.crc"] = b"no data"
        whole = ParquetSource("s3://bucket/data/", store.options).row_groups
        assert len(whole) == FILES
        named = [f"s3://{key}" for key in sorted(store.objects) if "part" in key]
        assert ParquetSource(named, store.options).row_groups == whole
        for wrong in ("s3://bucket/nowhere", [named[0], "s3://bucket/data/part-9999.parquet"]):
            with pytest.raises(SourceError, match="is not there"):
                ParquetSource(wrong, store.options)


@pytest.mark.parametrize(("latency", "most"), [(0.0, LEAST_IN_FLIGHT), (0.04, 20), (0.5, MOST_IN_FLIGHT)])
def test_requests_in_flight_follow_the_latency(latency: float, most: int) -> None:
    limiter = RequestLimiter()
    for slower in (0.0, 0.3, 0.1):
        limiter.answered(time.monotonic() - latency - slower)
    assert limiter.most == pytest.approx(most, abs=1)


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_slow_bodies_do_not_ask_for_more_requests(tmp_path: Path, kind: str) -> None:
    write_rows(tmp_path, [[20_000]])
    with store_of(tmp_path, kind) as (store, open_it):
        store.bytes_per_second = 5e5
        source = open_it()
        source.read(source.row_groups[0], ["row"])
        assert source._source.in_flight < MOST_IN_FLIGHT // 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_a_body_that_comes_may_take_longer_than_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("farandole.data.stores.s3_client._READ_TIMEOUT", 0.3)
    monkeypatch.setattr("farandole.data.stores.web_client._TIMEOUT", 0.3)
    pq.write_table(pa.table({"x": np.random.default_rng(0).random(300_000)}), tmp_path / "1.parquet")  # 2.4 MB
    with store_of(tmp_path, kind) as (store, open_it):
        source = open_it()
        store.bytes_per_second = 4e6
        assert source.read(source.row_groups[0], ["x"]).num_rows == 300_000


def test_a_busy_store_gets_half_of_the_requests() -> None:
    limiter = RequestLimiter(attempts=2, first_pause=0.001)
    failures = iter([PassingFailure("status 503", busy=True)])

    def request() -> int:
        for failure in failures:
            raise failure
        return 7

    limiter.answered(time.monotonic() - 0.06)
    most = limiter.most
    assert most == pytest.approx(30, abs=1)
    assert limiter.call("s3://x/y", request) == 7
    assert limiter.most == most // 2


def test_some_row_groups_are_decoded_while_as_many_as_asked_are_in_flight(folder: Path) -> None:
    together = threading.Barrier(5)

    class Far(ParquetSource):
        in_flight = 4

        def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
            together.wait(20)
            return super().read(row_group, columns)

    loader = Loader(Far(str(folder)), batch_size=FILES * ROWS, policy="join", reading=Reading(lanes=1, window=1 << 10))
    assert sum(batch.rows for batch in loader) == FILES * ROWS


def test_spans_with_small_holes_are_one() -> None:
    spans = [Span(50, 60), Span(0, 10), Span(12, 20), Span(55, 58)]
    assert coalesce(spans, hole=5) == [Span(0, 20), Span(50, 60)]
    assert coalesce([], hole=5) == coalesce([Span(0, 0)], hole=5) == []


def test_a_request_does_not_wait_for_ever_for_those_in_flight() -> None:
    limiter, held = RequestLimiter(patience=0.02), threading.Event()
    limiter.answered(time.monotonic())
    with ThreadPoolExecutor(LEAST_IN_FLIGHT) as pool:
        others = [pool.submit(limiter.call, "s3://x/y", held.wait) for _ in range(LEAST_IN_FLIGHT)]
        while limiter._running < LEAST_IN_FLIGHT:
            time.sleep(0.001)
        with pytest.raises(
            SourceError, match=r"s3://x/z: cannot be read: 4 requests in flight, none ended within 0.02"
        ):
            limiter.call("s3://x/z", lambda: 1)
        held.set()
        assert all(each.result() for each in others)


def test_a_client_that_cannot_be_made_is_told_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("s3fs")  # which cannot be imported below
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with ObjectStore.serving(folder) as store:
        source = ParquetSource("s3://bucket/data", store.options)
        assert len(source.row_groups) == FILES
    told = [each.getMessage() for each in caplog.records if "several times as many requests" in each.getMessage()]
    assert len(told) == 1
    assert "s3://bucket/data" in told[0]
    assert "botocore" in told[0]


def test_siblings_whose_names_begin_alike_are_not_all_listed(tmp_path: Path) -> None:
    write_rows(tmp_path, [[ROWS]] * 3)
    with store_of(tmp_path, "s3") as (store, open_it):
        open_it()
        alone = store.requests["LIST"]
        store.objects |= {f"bucket/data-2023/{number}.parquet": b"x" for number in range(40)}
        store.reset()
        store.page = 4
        assert len(open_it().row_groups) == 3
        assert store.requests["LIST"] <= alone + 2


def test_a_store_is_connected_to_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    create = botocore.session.Session.create_client

    def counting(self: Any, service: str, **how: Any) -> Any:
        made.append(service)
        return create(self, service, **how)

    monkeypatch.setattr(botocore.session.Session, "create_client", counting)
    with ObjectStore.serving(folder) as store:
        source = ParquetSource("s3://bucket/data", store.options)
        source.read(source.row_groups[0], ["row"])
    assert made == ["s3"]


def test_credentials_that_expire_within_an_epoch_are_renewed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = folder.parent / "credentials"

    def renew(key: str) -> None:
        written = told.with_suffix(".new")  # a reader sees the old file or the new one
        written.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\naws_session_token = t\n")
        written.replace(told)

    for name, value in {"SHARED_CREDENTIALS_FILE": str(told), "EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    renew("first")
    with ObjectStore.serving(folder) as store:
        options = {"client_kwargs": {"region_name": "us-east-1", "endpoint_url": f"http://{store.address}"}}
        source = _hasty(ParquetSource("s3://bucket/data", options))
        loader = Loader(source, batch_size=5, policy="join", reading=IN_FILE_ORDER)
        rows, accounts = [], set()

        def fault(request: Request) -> str | None:
            accounts.add(request.account)
            return "expired" if request.account == "first" else None

        for batch in loader:
            rows += batch["row"].tolist()
            if not accounts:
                _, expired = source._source._files.client._made  # type: ignore[union-attr]
                renew("second")
                store.fault = fault
        assert sorted(rows) == list(range(FILES * ROWS))
        assert accounts == {"first", "second"}
        assert expired._connections._closed and not any(expired._connections._kept.values())
        store.fault = lambda request: "expired"
        with pytest.raises(SourceError, match=r"ExpiredToken.* at attempt 4 of 4"):
            source.read(source.row_groups[0], ["row"])


def test_answers_of_s3_that_need_its_client_are_left_to_it(folder: Path) -> None:
    with ObjectStore.serving(folder) as store:
        source = ParquetSource("s3://bucket/data", store.options)
        wanted = source.read(source.row_groups[0], ["row"])
        store.fault = lambda request: 301 if not request.before % 2 else None  # as for a bucket of another region
        store._seen.clear()
        assert source.read(source.row_groups[0], ["row"]) == wanted
        store.reset()
        store.fault = lambda request: None
        assert source.read(source.row_groups[0], ["row"]) == wanted
        assert store.requests == {"GET": 1}


@pytest.mark.parametrize("anonymous", [False, True])
@pytest.mark.parametrize("region", ["us-east-1", "eu-west-1", "cn-north-1"])
@pytest.mark.parametrize("bucket", ["my-bucket", "my.bucket"])
def test_requests_go_where_botocore_sends_them(region: str, bucket: str, anonymous: bool) -> None:
    how = {"anon": True} if anonymous else {"key": "K", "secret": "S"}
    client = S3Client("s3://my-bucket/x", {**how, "client_kwargs": {"region_name": region}})
    theirs, ours = client._connected()

    class Sent(Exception):
        """Raised instead of sending a request."""

    def note(request: Any, **_: Any) -> None:
        raise Sent(request.url)

    theirs.meta.events.register("before-send.s3.GetObject", note)
    with pytest.raises(Sent) as sent:
        theirs.get_object(Bucket=bucket, Key="a b/x~y=z")
    assert f"{ours._begin(bucket)}a%20b/x~y%3Dz" == str(sent.value)
