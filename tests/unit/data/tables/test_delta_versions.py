"""Versions of Delta tables: by number and time, in states, alike on all ranks."""

import json
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deltalake")
pytest.importorskip("fsspec")

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

from farandole.data import (
    CachedSource,
    DeltaSource,
    IcebergSource,
    Loader,
    ParquetSource,
    SelectedSource,
    make_batch_reader,
)
from farandole.errors import ConfigError, SourceError
from helpers.meeting import Meeting
from helpers.tables import rows_of, some_rows, start_deltalake


@pytest.fixture(scope="module", autouse=True)
def deltalake_threads() -> None:
    """Start deltalake before the first test counts threads and descriptors."""
    start_deltalake()


def test_a_version_is_that_of_its_number_or_time(tmp_path: Path) -> None:
    url = str(tmp_path)
    for first in (0, 10, 20):
        write_deltalake(url, some_rows(first, 2), mode="overwrite")
        log = tmp_path / "_delta_log" / f"{first // 10:020}.json"
        at = datetime(2024, 5, 1 + first // 10, tzinfo=UTC).timestamp()
        text = log.read_text().splitlines()
        told = [json.loads(line) for line in text]
        for action in told:
            if "commitInfo" in action:
                action["commitInfo"]["timestamp"] = int(at * 1000)
        log.write_text("\n".join(map(json.dumps, told)))  # whose own time is now, as in a copy of a table
    noon = [datetime(2024, 5, day, 12, tzinfo=UTC) for day in (1, 2, 3)]
    assert [DeltaSource(url, timestamp=each).version for each in noon] == [0, 1, 2]
    assert rows_of(DeltaSource(url, version=1), ["id"]) == Counter([("10",), ("11",)])
    assert DeltaSource(url).version == ParquetSource(url).version == 2
    with pytest.raises(SourceError, match="had no version at 2024-04"):
        DeltaSource(url, timestamp=noon[0] - timedelta(days=3))
    with pytest.raises(SourceError, match=r"version 7 cannot be opened .* vacuumed, or never"):
        DeltaSource(url, version=7)
    with pytest.raises(ConfigError, match="exclude each other"):
        DeltaSource(url, version=1, timestamp=noon[0])
    with pytest.raises(ConfigError, match="is that of a table"):
        pq.write_table(some_rows(0), tmp_path.parent / "plain.parquet")
        ParquetSource(str(tmp_path.parent / "plain.parquet"), version=1)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"version": -1}, "version: must be >= 0, got -1"),
        ({"version": "1"}, "version: must be an integer, got '1'"),
        ({"timestamp": "2024-05-01"}, "timestamp: must be a datetime, got '2024-05-01'"),
        ({"timestamp": date(2024, 5, 1)}, "timestamp: must be a datetime, got datetime.date"),
    ],
    ids=str,
)
def test_wrong_versions_and_times_are_named(tmp_path: Path, asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        DeltaSource(str(tmp_path), **asked)
    names = {"version": "snapshot", "timestamp": "timestamp"}
    with pytest.raises(ConfigError, match=re.escape(problem.replace("version", "snapshot"))):
        IcebergSource(str(tmp_path), **{names[name]: value for name, value in asked.items()})


def test_times_in_commits_come_before_those_of_their_writers(tmp_path: Path) -> None:
    url = str(tmp_path)
    for version in range(3):
        write_deltalake(url, pa.table({"id": [version]}), mode="append")
    made = datetime(2024, 5, 1, tzinfo=UTC)
    for version, hours in enumerate((0, 2, 1)):  # the last writer's clock was late
        log = tmp_path / "_delta_log" / f"{version:020}.json"
        told = [json.loads(line) for line in log.read_text().splitlines()]
        for action in told:
            if "commitInfo" in action:
                at = int((made + timedelta(hours=hours)).timestamp() * 1000)
                action["commitInfo"] |= {"inCommitTimestamp": at, "timestamp": at + 10**9}
        log.write_text("\n".join(map(json.dumps, told)))
    asked = [made + timedelta(minutes=minutes) for minutes in (0, 90, 120)]
    assert [DeltaSource(url, timestamp=each).version for each in asked] == [0, 0, 2]


def test_a_log_without_times_is_asked_for_versions_by_number(tmp_path: Path) -> None:
    url = str(tmp_path)
    for version in range(2):
        write_deltalake(url, pa.table({"id": [version]}), mode="append")
    log = tmp_path / "_delta_log" / f"{1:020}.json"
    log.write_text("\n".join(line for line in log.read_text().splitlines() if "commitInfo" not in line))
    with pytest.raises(SourceError, match="has no time of version 1 in its log; name a version by its number"):
        DeltaSource(url, timestamp=datetime(2100, 1, 1))
    DeltaTable(url).create_checkpoint()
    for commit in tmp_path.glob("_delta_log/*.json"):
        commit.unlink()
    with pytest.raises(SourceError, match="has no time of version 1 in its log"):
        DeltaSource(url, timestamp=datetime(2100, 1, 1))
    assert DeltaSource(url, version=1).version == 1


@pytest.mark.parametrize("kind", ["table", "folder", "selected", "cached"])
def test_a_state_goes_on_with_its_version(tmp_path: Path, kind: str) -> None:
    url = str(tmp_path / "table")

    def open_source() -> Any:
        source = DeltaSource(url) if kind == "table" else ParquetSource(url)
        if kind == "cached":
            return CachedSource(source, tmp_path / "cache", 1 << 20)
        return SelectedSource(source, [("id", ">=", 0)]) if kind == "selected" else source

    columns = ["id", "list"]
    write_deltalake(url, some_rows(0, 20).select(columns))
    loader = Loader(open_source(), batch_size=3, policy="join", columns=None if kind == "table" else ["id", "list"])
    batches = iter(loader)
    seen = [int(row) for _ in range(2) for row in next(batches)["id"]]
    batches.close()  # type: ignore[attr-defined]
    state = loader.state_dict()
    assert state["version"] == 0
    # As many rows in as many files: only the version tells the difference.
    write_deltalake(
        url,
        some_rows(1000, 20).select(columns).append_column("more", [range(20)]),
        mode="overwrite",
        schema_mode="overwrite",
    )
    later = Loader(open_source(), batch_size=3, policy="join", columns=None if kind == "table" else ["id", "list"])
    assert later.state_dict()["version"] == 1
    later.load_state_dict(json.loads(json.dumps(state)))
    seen += [int(row) for batch in later for row in batch["id"]]
    assert sorted(seen) == list(range(20))
    assert later.state_dict() == state | {"epoch": 1, "visited": 0}
    table = DeltaTable(url)
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    if kind != "cached":  # which has the rows
        last = None
        with pytest.raises(SourceError, match=r"version 0 of .* was vacuumed"):
            last = Loader(open_source(), batch_size=3, policy="join", columns=["id"])
            last.load_state_dict(state)
            list(last)
    table.create_checkpoint()
    (tmp_path / "table" / "_delta_log" / f"{0:020}.json").unlink()
    with pytest.raises(SourceError, match="version 0 cannot be opened"):
        Loader(open_source(), batch_size=3, policy="join", columns=["id"]).load_state_dict(state)


def test_another_version_is_read_with_the_same_checks(tmp_path: Path) -> None:
    url, rows = str(tmp_path), pa.table({"id": range(1000)})
    write_deltalake(url, rows)
    (path,) = tmp_path.glob("*.parquet")
    pq.write_table(rows, path, write_page_checksum=True, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    place = content.index((500).to_bytes(8, "little"))
    content[place] ^= 1
    path.write_bytes(content)
    (log,) = tmp_path.glob("_delta_log/*.json")
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "add" in action:
            action["add"]["size"] = len(content)
    log.write_text("\n".join(map(json.dumps, actions)))
    write_deltalake(url, rows, mode="overwrite")
    rows_of(ParquetSource(url, version=0), ["id"])
    with pytest.raises(SourceError, match="CRC"):
        rows_of(ParquetSource(url, verify=True).at(0), ["id"])


def test_a_state_of_a_table_is_none_of_plain_files(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "table"), pa.table({"id": range(4)}))
    pq.write_table(pa.table({"id": range(4)}), tmp_path / "plain.parquet")
    table, plain = (
        Loader(ParquetSource(str(tmp_path / name)), batch_size=1, policy="join") for name in ("table", "plain.parquet")
    )
    for one, other in ((table, plain), (plain, table)):
        with pytest.raises(ConfigError, match="belongs to other data"):
            one.load_state_dict(other.state_dict())
    old = plain.state_dict()
    del old["version"]  # as before there were tables
    plain.load_state_dict(old)


def test_all_ranks_read_the_version_that_rank_0_has_opened(tmp_path: Path) -> None:
    url = str(tmp_path)
    write_deltalake(url, some_rows(0, 8))
    sources = [ParquetSource(url)]
    write_deltalake(url, some_rows(100, 8), mode="overwrite")
    sources += [ParquetSource(url), DeltaSource(url)]
    meeting = Meeting(3)

    def read(rank: int) -> list[int]:
        loader = Loader(
            sources[rank], batch_size=2, policy="join", columns=["id"], rank=rank, size=3, gather=meeting.of(rank)
        )
        assert loader.state_dict()["version"] == 0
        return [int(row) for batch in loader for row in batch["id"]]

    with ThreadPoolExecutor(3) as pool:
        assert sorted(row for rows in pool.map(read, range(3)) for row in rows) == list(range(8))


def test_readers_take_a_version(tmp_path: Path) -> None:
    url = str(tmp_path)
    for first in (0, 10):
        write_deltalake(url, some_rows(first, 4), mode="overwrite")
    for version, first in ((0, 0), (None, 10)):
        with make_batch_reader(url, ["id"], version=version) as reader:
            assert sorted(int(row) for batch in reader for row in batch.id) == list(range(first, first + 4))


def test_shards_read_the_version_of_the_first_with_gather_and_are_warned_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, meeting = str(tmp_path), Meeting(2)
    write_deltalake(url, some_rows(0, 8))
    written = threading.Event()

    def read(shard: int) -> list[int]:
        def gather(mine: Any) -> list[Any]:
            if shard == 0 and not written.is_set():  # it has opened the table
                write_deltalake(url, some_rows(100, 8), mode="overwrite")
                written.set()
            told: list[Any] = meeting.of(shard)(mine)
            return told

        assert shard == 0 or written.wait(20)
        with make_batch_reader(url, ["id"], cur_shard=shard, shard_count=2, gather=gather) as reader:
            return [int(row) for batch in reader for row in batch.id]

    with ThreadPoolExecutor(2) as pool:
        assert sorted(row for rows in pool.map(read, range(2)) for row in rows) == list(range(8))
    assert "newest version" not in caplog.text
    for shard in range(2):
        make_batch_reader(url, ["id"], cur_shard=shard, shard_count=2).stop()
    assert caplog.text.count("2 shards each open the newest version") == 1
    assert "version=1" in caplog.text
