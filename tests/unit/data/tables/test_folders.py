"""Tables that have a log: their files are never read without it, as they also hold rows that were removed."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.memory import MemoryFileSystem

from farandole.data import ParquetSource, make_batch_reader
from farandole.errors import SourceError

# The file that marks a table, below the table's folder, and the text that names the kind.
MARKS = {
    "_delta_log/00000000000000000000.json": "is a Delta table .*Name this folder alone.*DeltaSource",
    "metadata/00001-aaaa.metadata.json": "is an Iceberg table .*Name this folder alone.*IcebergSource",
    ".hoodie/hoodie.properties": "is a Hudi table .*Spark",
    "_spark_metadata/0": "is the output of a Spark stream .*Name this folder alone.*StreamSource",
}
# The package that reads the log of a table, and the text that names the extra which brings it.
EXTRAS = {
    "_delta_log/00000000000000000000.json": ("deltalake", r"is a Delta table .*pip install 'farandole\[delta\]'"),
    "metadata/00001-aaaa.metadata.json": ("pyiceberg", r"is an Iceberg table .*pip install 'farandole\[iceberg\]'"),
}


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URL of a folder, on disk and in a file system of fsspec."""
    return str(tmp_path) if request.param == "local" else f"memory://{tmp_path}"


def write(url: str, rows: range) -> None:
    fs, path = fsspec.core.url_to_fs(url)
    fs.makedirs(fs._parent(path), exist_ok=True)
    with fs.open(path, "wb") as file:
        pq.write_table(pa.table({"row": list(rows)}), file)


def mark_table(folder: str, mark: str) -> None:
    fs, path = fsspec.core.url_to_fs(f"{folder}/{mark}")
    fs.makedirs(fs._parent(path), exist_ok=True)
    fs.pipe_file(path, b"{}")


class Hider:
    """A finder that makes a package look as if it were not installed."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == self._package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def write_overwritten_table(folder: str, mark: str) -> str:
    """Write 100 rows that a table has, and 100 that it had before; return its URL."""
    write(f"{folder}/table/part-0.parquet", range(100))
    write(f"{folder}/table/part-1.parquet", range(100))
    assert sum(group.rows for group in ParquetSource(f"{folder}/table").row_groups) == 200
    mark_table(f"{folder}/table", mark)
    return f"{folder}/table"


@pytest.mark.parametrize("mark", [".hoodie/hoodie.properties"])
@pytest.mark.parametrize("read", [ParquetSource, make_batch_reader])
def test_a_table_whose_log_cannot_be_read_is_refused(folder: str, mark: str, read) -> None:  # type: ignore[no-untyped-def]
    url = write_overwritten_table(folder, mark)
    with pytest.raises(SourceError, match=MARKS[mark]) as refused:
        read(url)
    assert refused.value.path.endswith("/table")
    assert "write its rows to another folder as plain Parquet" in refused.value.problem


@pytest.mark.parametrize("mark", EXTRAS)
@pytest.mark.parametrize("read", [ParquetSource, make_batch_reader])
def test_a_table_is_refused_without_its_extra(  # type: ignore[no-untyped-def]
    folder: str, mark: str, read, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, (package, text) = write_overwritten_table(folder, mark), EXTRAS[mark]
    for name in [each for each in sys.modules if each.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hider(package), *sys.meta_path])
    with pytest.raises(SourceError, match=text):
        read(url)


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize(
    "part",
    ["table/day=1", "table/day=1/*.parquet", "table/*", "table/day=1/part-0.parquet", "", "table/day=1/part-[01]*"],
)
def test_parts_of_a_table_and_folders_that_hold_one_are_refused(folder: str, mark: str, part: str) -> None:
    for day in (1, 2):
        write(f"{folder}/table/day={day}/part-0.parquet", range(3))
    mark_table(f"{folder}/table", mark)
    with pytest.raises(SourceError, match=MARKS[mark]):
        ParquetSource(f"{folder}/{part}")
    with pytest.raises(SourceError, match=MARKS[mark]):
        ParquetSource([f"{folder}/table/day={day}/part-0.parquet" for day in (1, 2)])


def test_files_of_iceberg_are_refused_by_their_data_folder(folder: str) -> None:
    write(f"{folder}/table/data/a1b2/part-0.parquet", range(3))
    mark_table(f"{folder}/table", "metadata/v2.metadata.json")
    for part in ("table/data", "table/data/a1b2", "table/data/*/*.parquet"):
        with pytest.raises(SourceError, match="is an Iceberg table"):
            ParquetSource(f"{folder}/{part}")


def test_partitions_of_hudi_are_refused_by_their_own_mark(folder: str) -> None:
    write(f"{folder}/2024/01/part-0.parquet", range(3))
    mark_table(f"{folder}/2024/01", ".hoodie_partition_metadata")
    with pytest.raises(SourceError, match="is a Hudi table"):
        ParquetSource(f"{folder}/2024")


def test_a_link_to_a_part_of_a_table_is_refused(tmp_path: Path) -> None:
    write(f"{tmp_path}/table/day=1/part-0.parquet", range(3))
    (tmp_path / "table" / "_delta_log").mkdir()
    (tmp_path / "today").symlink_to(tmp_path / "table" / "day=1")
    for url in (f"{tmp_path}/today", f"{tmp_path}/today/part-0.parquet"):
        with pytest.raises(SourceError, match="is a Delta table"):
            ParquetSource(url)


def test_what_is_beside_a_table_and_notes_of_other_tools_are_read(folder: str) -> None:
    write(f"{folder}/table/part-0.parquet", range(3))
    mark_table(f"{folder}/table", "_delta_log/0.json")
    write(f"{folder}/plain/part-0.parquet", range(4))
    for note in ("_SUCCESS", "_metadata", "metadata/readme.json", "_temporary/0/x.parquet", ".part-0.parquet.crc"):
        mark_table(f"{folder}/plain", note)
    assert sum(group.rows for group in ParquetSource(f"{folder}/plain").row_groups) == 4


class CountingFileSystem(MemoryFileSystem):
    """A store that counts requests, by kind."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    asked: ClassVar[Counter[str]] = Counter()

    def exists(self, path: str, **options: Any) -> bool:
        self.asked["exists"] += 1
        return bool(super().exists(path, **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self.asked["ls"] += 1
        return super().ls(path, detail=detail, **options)


@pytest.mark.parametrize("form", ["folder", "list", "glob"])
def test_looking_for_tables_costs_as_much_for_many_files_as_for_few(form: str) -> None:
    fsspec.register_implementation("counted", CountingFileSystem, clobber=True)
    costs = []
    for count in (2, 40):
        urls = [f"counted://bucket/{form}{count}/part-{number}.parquet" for number in range(count)]
        for url in urls:
            write(url, range(2))
        CountingFileSystem.asked.clear()
        folder = urls[0].rpartition("/")[0]
        ParquetSource({"folder": folder, "list": urls, "glob": f"{folder}/*.parquet"}[form])
        costs.append(dict(CountingFileSystem.asked))
    assert costs[0] == costs[1]


def test_many_folders_of_a_far_store_are_not_all_looked_at() -> None:
    fsspec.register_implementation("counted", CountingFileSystem, clobber=True)
    urls = [f"counted://bucket/spread/{number}/part.parquet" for number in range(200)]
    for url in urls:
        write(url, range(1))
    CountingFileSystem.asked.clear()
    ParquetSource(urls)
    assert CountingFileSystem.asked["exists"] < 150


def test_folders_that_may_not_be_looked_at_keep_nobody_from_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("counted", CountingFileSystem, clobber=True)
    write("counted://bucket/closed/part.parquet", range(5))

    def forbidden(*_: object, **__: object) -> bool:
        raise PermissionError("403")

    monkeypatch.setattr(CountingFileSystem, "exists", forbidden)
    assert sum(group.rows for group in ParquetSource("counted://bucket/closed/part.parquet").row_groups) == 5
