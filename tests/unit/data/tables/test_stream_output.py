"""Outputs of Spark streams: the rows of finished batches, as the folder's log names them."""

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.memory import MemoryFileSystem

from farandole.data import Growing, GrowingLoader, Loader, ParquetSource, StreamSource
from farandole.errors import ConfigError, SourceError
from helpers.tables import note_stores


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URL of a folder, on disk and in a file system of fsspec."""
    return f"{tmp_path}/out" if request.param == "local" else f"memory://{tmp_path}/out"


class Sink:
    """Writes as Spark's sink does: data files first, then the batch's file in the log."""

    def __init__(self, url: str) -> None:
        self.fs, self.folder = fsspec.core.url_to_fs(url)
        self.fs.makedirs(f"{self.folder}/_spark_metadata", exist_ok=True)
        self.lines: list[str] = []

    def data(self, name: str, rows: range) -> str:
        """Write a file of data; return its line in the log."""
        path = f"{self.folder}/{name}"
        self.fs.makedirs(self.fs._parent(path), exist_ok=True)
        with self.fs.open(path, "wb") as file:
            pq.write_table(pa.table({"row": list(rows)}), file)
        facts = {"path": f"file://{quote(path)}", "size": self.fs.size(path), "isDir": False}
        facts |= {"modificationTime": 1700000000000, "blockReplication": 1, "blockSize": 1 << 25, "action": "add"}
        return json.dumps(facts)

    def batch(self, number: int, *lines: str, compact: bool = False) -> None:
        self.lines += lines
        told = self.lines if compact else lines
        name = f"{number}.compact" if compact else f"{number}"
        self.fs.pipe_file(f"{self.folder}/_spark_metadata/{name}", "\n".join(["v1", *told]).encode())


def rows_of(source: ParquetSource | StreamSource) -> list[int]:
    tables = [source.read(group, ["row"]) for group in source.row_groups]
    return sorted(value for table in tables for value in table["row"].to_pylist())


def written(url: str) -> Sink:
    """Six batches, of which the third is compact and the fifth empty, and what failed batches have left."""
    sink = Sink(url)
    sink.batch(0, sink.data("part 0.parquet", range(0, 3)))
    sink.batch(1, sink.data("part-1.parquet", range(3, 5)), sink.data("part-2.parquet", range(5, 6)))
    sink.batch(2, compact=True)
    sink.batch(3, sink.data("part-3.parquet", range(6, 10)))
    sink.batch(4)
    sink.batch(5, sink.data("part-5.parquet", range(10, 12)))
    sink.data("part-99.parquet", range(900, 999))
    sink.fs.pipe_file(f"{sink.folder}/_spark_metadata/.6.tmp", b"v1")
    return sink


def test_a_store_is_opened_once_to_find_and_read_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written(url)
    opened = note_stores(monkeypatch)
    ParquetSource(url)
    assert opened == [url]


def test_rows_are_those_of_finished_batches(url: str) -> None:
    written(url)
    for source in (StreamSource(url), ParquetSource(url), ParquetSource([f"{url}/"])):
        assert rows_of(source) == list(range(12))
        assert source.version == 5
    for batch, rows in ((0, 3), (1, 6), (2, 6), (3, 10), (4, 10)):
        assert rows_of(StreamSource(url, batch=batch)) == list(range(rows))
        assert rows_of(ParquetSource(url, version=batch)) == list(range(rows))
        assert rows_of(ParquetSource(url).at(batch)) == list(range(rows))


class ListingOnce(MemoryFileSystem):  # type: ignore[misc]
    """Keeps its listings, as the file systems of object stores do."""

    protocol = "listing-once"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("listing-once:/")))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True, **kwargs)
        return [each if detail else each["name"] for each in self.dircache[path]]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()


def test_a_batch_that_has_finished_since_is_read(tmp_path: Path) -> None:
    fsspec.register_implementation("listing-once", ListingOnce, clobber=True)
    url = f"listing-once://{tmp_path}/out"
    sink = written(url)
    assert StreamSource(url).version == 5
    sink.batch(6, sink.data("part-6.parquet", range(12, 14)))
    assert StreamSource(url).version == ParquetSource(url).version == 6
    assert rows_of(StreamSource(url)) == list(range(14))


def test_a_file_of_the_log_that_is_gone_is_named(url: str) -> None:
    sink = written(url)
    sink.fs.rm(f"{sink.folder}/part-1.parquet")
    with pytest.raises(SourceError, match=r"part-1.parquet.* in the log of .* removed by hand, or by a retention"):
        StreamSource(url)


def test_batches_before_a_compact_one_are_not_told_apart_once_spark_has_removed_them(url: str) -> None:
    sink = written(url)
    for number in (0, 1):
        sink.fs.rm(f"{sink.folder}/_spark_metadata/{number}")
    assert rows_of(StreamSource(url)) == list(range(12))
    with pytest.raises(SourceError, match=r"has no batch 1 in its log, .*Its batches are 2 to 5"):
        StreamSource(url, batch=1)
    with pytest.raises(SourceError, match="has no batch 6 in its log"):
        StreamSource(url, batch=6)


def test_a_missing_batch_is_not_passed_over(url: str) -> None:
    sink = written(url)
    sink.fs.rm(f"{sink.folder}/_spark_metadata/4")
    with pytest.raises(SourceError, match="has no batch 5 in its log, or not all batches before it: 4 is not there"):
        StreamSource(url)


def test_a_loader_goes_on_with_the_batches_of_its_state(url: str) -> None:
    sink = written(url)
    loader = Loader(ParquetSource(url), batch_size=5, seed=3, policy="join")
    before = [batch["row"].tolist() for batch in loader]
    state = Loader(ParquetSource(url), batch_size=5, seed=3, policy="join").state_dict()
    sink.batch(6, sink.data("part-6.parquet", range(12, 40)))
    again = Loader(ParquetSource(url), batch_size=5, seed=3, policy="join")
    again.load_state_dict(state)
    assert [batch["row"].tolist() for batch in again] == before


def test_a_folder_that_was_moved_is_read_where_it_is(tmp_path: Path) -> None:
    written(f"{tmp_path}/out")
    shutil.move(tmp_path / "out", tmp_path / "moved")
    assert rows_of(StreamSource(str(tmp_path / "moved"))) == list(range(12))


def test_partitions_of_a_moved_folder(tmp_path: Path) -> None:
    sink = Sink(f"{tmp_path}/out=1/x")
    sink.batch(0, sink.data("day=1/city=a b/part-0.parquet", range(3)), sink.data("day=2/city=c/p.parquet", range(1)))
    shutil.move(tmp_path / "out=1" / "x", tmp_path / "moved")
    source = StreamSource(str(tmp_path / "moved"))
    cities = [source.read(group, ["day", "city"])["city"].to_pylist() for group in source.row_groups]
    assert cities == [["a b"] * 3, ["c"]]


def test_logs_that_cannot_be_read_are_refused(url: str) -> None:
    sink = Sink(url)
    with pytest.raises(SourceError, match="has not finished a batch yet"):
        ParquetSource(url)
    sink.batch(0)
    with pytest.raises(SourceError, match="no batch of this Spark stream had rows"):
        ParquetSource(url)
    sink.batch(1, '{"path": 7}')
    with pytest.raises(SourceError, match="has a damaged log: _spark_metadata/1"):
        ParquetSource(url)
    sink.fs.pipe_file(f"{sink.folder}/_spark_metadata/1", b"v2\n{}")
    with pytest.raises(SourceError, match="_spark_metadata/1 begins with 'v2'"):
        ParquetSource(url)
    sink.fs.pipe_file(f"{sink.folder}/_spark_metadata/1", b"")
    with pytest.raises(SourceError, match="_spark_metadata/1 begins with ''"):
        ParquetSource(url)


def test_removed_files_are_not_read(url: str) -> None:
    sink = written(url)
    last = json.loads(sink.lines[-1])
    sink.batch(6, json.dumps({**last, "action": "delete"}))
    assert rows_of(StreamSource(url)) == list(range(10))


def test_a_state_of_plain_files_does_not_fit(url: str, tmp_path: Path) -> None:
    written(url)
    pq.write_table(pa.table({"row": list(range(12))}), tmp_path / "plain.parquet")
    state = Loader(ParquetSource(str(tmp_path / "plain.parquet")), batch_size=5, seed=3, policy="join").state_dict()
    with pytest.raises(ConfigError, match="no version of a table, and this data has version 5"):
        Loader(ParquetSource(url), batch_size=5, seed=3, policy="join").load_state_dict(state)


def test_a_stream_feeds_a_loader_while_it_goes_on(url: str) -> None:
    growing = Growing(url, format="stream", until=3, poll=0, patience=5)
    written: list[int] = []
    sink: list[Sink] = []

    def look(seen: Any) -> Any:
        """Finish a batch before each look, and leave a file of a batch that is not finished."""
        number = len(written)
        if number == 1:  # the first look finds nothing
            sink.append(Sink(url))
        if sink:
            line = sink[0].data(f"{number}.parquet", range(3 * number, 3 * number + 3))
            sink[0].batch(number - 1, line)
            sink[0].data(f"unfinished-{number}.parquet", range(1000, 1003))
        written.append(number)
        return Growing.look(growing, seen)

    growing.look = look  # type: ignore[method-assign]
    loader = GrowingLoader(growing, batch_size=2)
    batches = iter(loader)
    assert sorted(next(batches)["row"].tolist() + next(batches)["row"].tolist()) == [3, 4, 5]  # type: ignore[operator, union-attr]
    resumed = GrowingLoader(growing, batch_size=5, state=json.loads(json.dumps(loader.state_dict())))
    assert sorted(row for batch in resumed for row in batch["row"].tolist()) == list(range(6, 15))  # type: ignore[union-attr]
