"""Deleted rows of Iceberg tables, as positions and as deletion vectors; pyiceberg itself writes neither."""

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyiceberg")
pytest.importorskip("sqlalchemy")
pytest.importorskip("fsspec")

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.manifest import DataFile as Entry
from pyiceberg.manifest import (
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table import StaticTable, Table
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.typedef import Record

from farandole.data import IcebergSource
from farandole.data.formats.file_systems import Files
from farandole.data.formats.row_groups import File
from farandole.errors import SourceError
from helpers.tables import as_counter, iceberg_catalog, rows_of, some_rows, start_pyiceberg

COLUMNS = ["id", "text", "day", "at", "number", "list"]


@pytest.fixture(scope="module", autouse=True)
def pyiceberg_threads() -> None:
    """Start pyiceberg's threads before the first test counts threads."""
    start_pyiceberg()


catalog = pytest.fixture(iceberg_catalog)


def two_files(catalog: InMemoryCatalog) -> Table:
    table = catalog.create_table("db.t", some_rows(0).schema)
    table.append(some_rows(0))
    table.append(some_rows(10))
    return table


class DeletesWriter(ManifestWriterV2):
    """A manifest of files that hold deleted rows; pyiceberg itself writes none."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES


def bitmap_of(rows: Sequence[int]) -> bytes:
    """Return a 32-bit Roaring bitmap of a few ascending rows, in its portable form, without runs."""
    parts = {high: [row & 0xFFFF for row in group] for high, group in groupby(rows, lambda row: row >> 16)}
    heads = b"".join(struct.pack("<HH", high, len(lows) - 1) for high, lows in parts.items())
    before = [0, *accumulate(2 * len(lows) for lows in parts.values())]
    starts = [8 + 8 * len(parts) + offset for offset in before[:-1]]
    lows = [low for group in parts.values() for low in group]
    return struct.pack(f"<II{len(heads)}s{len(starts)}I{len(lows)}H", 12346, len(parts), heads, *starts, *lows)


def vector_of(rows: Sequence[int]) -> bytes:
    """Return the blob deletion-vector-v1: the 64-bit bitmap with its length, its magic and its checksum."""
    body = bytes.fromhex("D1D33964") + struct.pack("<QI", 1, 0) + bitmap_of(rows)
    return struct.pack(f">I{len(body)}sI", len(body), body, zlib.crc32(body))


def write_vectors(place: str, deleted: Mapping[str, Sequence[int]]) -> None:
    """Write a Puffin file with a deletion vector for each file of data."""
    content, blobs = b"PFA1", []
    for path, rows in deleted.items():
        vector = vector_of(rows)
        blobs.append(
            {
                "type": "deletion-vector-v1",
                "fields": [2147483545],  # the position of a row
                "snapshot-id": -1,
                "sequence-number": -1,
                "offset": len(content),
                "length": len(vector),
                "properties": {"referenced-data-file": path, "cardinality": str(len(rows))},
            }
        )
        content += vector
    footer = json.dumps({"blobs": blobs}).encode()
    content += b"PFA1" + footer + struct.pack("<II", len(footer), 0) + b"PFA1"
    Path(place).write_bytes(content)


def write_positions(place: str, deleted: Mapping[str, Sequence[int]]) -> None:
    """Write a Parquet file of deleted rows: positions in files of data."""
    pairs = [(path, row) for path, rows in deleted.items() for row in rows]
    ids = [{b"PARQUET:field_id": b"2147483546"}, {b"PARQUET:field_id": b"2147483545"}]
    schema = pa.schema(
        [pa.field("file_path", pa.string(), metadata=ids[0]), pa.field("pos", pa.int64(), metadata=ids[1])]
    )
    pq.write_table(pa.table(list(zip(*pairs, strict=True)) or [[], []], schema=schema), place)


def delete_rows(
    table: Table,
    deleted: Mapping[str, Sequence[int]],
    content: DataFileContent = DataFileContent.POSITION_DELETES,
    kind: FileFormat = FileFormat.PARQUET,
) -> Table:
    """Commit a file of deleted rows: positions in files of data."""
    snapshot = table.current_snapshot()
    assert snapshot is not None
    place = f"{table.location()}/data/deletes.{kind.lower()}"
    write = write_vectors if kind is FileFormat.PUFFIN else write_positions
    write(place, deleted)
    entry = Entry.from_args(
        content=content,
        file_path=place,
        file_format=kind,
        partition=Record(),
        record_count=sum(map(len, deleted.values())),
        file_size_in_bytes=os.path.getsize(place),
        equality_ids=[1] if content is DataFileContent.EQUALITY_DELETES else None,
    )
    new, number = snapshot.snapshot_id + 1, table.metadata.last_sequence_number + 1
    manifest = table.io.new_output(f"{table.location()}/metadata/deletes-m0.avro")
    with DeletesWriter(table.spec(), table.schema(), manifest, new, "null") as writer:
        writer.add_entry(
            ManifestEntry.from_args(
                status=ManifestEntryStatus.ADDED,
                snapshot_id=new,
                sequence_number=None,
                file_sequence_number=None,
                data_file=entry,
            )
        )
    listed = f"{table.location()}/metadata/snap-deletes.avro"
    with write_manifest_list(2, table.io.new_output(listed), new, snapshot.snapshot_id, number, "null") as lists:
        lists.add_manifests([writer.to_manifest_file(), *snapshot.manifests(table.io)])
    made = Snapshot(
        snapshot_id=new,
        parent_snapshot_id=snapshot.snapshot_id,
        sequence_number=number,
        timestamp_ms=snapshot.timestamp_ms + 1,
        manifest_list=listed,
        summary=Summary(Operation.DELETE),
        schema_id=table.schema().schema_id,
    )
    metadata = table.metadata.model_copy(
        update={
            "snapshots": [*table.metadata.snapshots, made],
            "current_snapshot_id": new,
            "last_sequence_number": number,
            "refs": {"main": table.metadata.refs["main"].model_copy(update={"snapshot_id": new})},
        }
    )
    number = int(Path(table.metadata_location).name.split("-")[0]) + 1
    place = f"{table.location()}/metadata/{number:05}-deletes.metadata.json"
    ToOutputFile.table_metadata(metadata, table.io.new_output(place))
    return StaticTable.from_metadata(place)


def test_deleted_positions_are_left_out(catalog: InMemoryCatalog) -> None:
    table = two_files(catalog)
    paths = [task.file.file_path for task in table.scan().plan_files()]
    later = delete_rows(table, {paths[0]: [0, 3, 9, 3], paths[1]: [5]})
    source = IcebergSource(later)
    assert sorted(group.rows for group in source.row_groups) == [7, 9]
    wanted = as_counter(later.scan().to_arrow())
    assert sum(wanted.values()) == 16
    assert rows_of(source, COLUMNS) == rows_of(IcebergSource(table.location()), COLUMNS) == wanted
    before = table.current_snapshot()
    assert before is not None
    assert sum(group.rows for group in IcebergSource(table.location(), snapshot=before.snapshot_id).row_groups) == 20


def test_rows_of_a_deletion_vector_are_left_out(catalog: InMemoryCatalog) -> None:
    """pyiceberg writes none; the file follows the specification of Puffin."""
    table = catalog.create_table("db.t", pa.schema({"id": pa.int64()}))
    first = 70_000  # rows, more than a container of a bitmap has
    for added in (range(first), range(first, first + 10)):
        table.append(pa.table({"id": added}))
    paths = {task.file.record_count: task.file.file_path for task in table.scan().plan_files()}
    gone = [0, 3, 65_535, 65_536, 69_999]
    later = delete_rows(table, {paths[first]: gone, paths[10]: [9]}, kind=FileFormat.PUFFIN)
    source = IcebergSource(later)
    assert sorted(group.rows for group in source.row_groups) == [9, first - 5]
    ids = [each for group in source.row_groups for each in source.read(group, ["id"])["id"].to_pylist()]
    assert sorted(ids) == [each for each in range(first + 9) if each not in gone]


def test_a_file_of_deleted_rows_is_read_once_for_all_files_of_data(
    catalog: InMemoryCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = two_files(catalog)
    paths = [task.file.file_path for task in table.scan().plan_files()]
    assert len(paths) == 2
    later = delete_rows(table, {path: [0] for path in paths})
    opened: list[str] = []
    files_open = Files.open

    def counting(self: Files, file: File) -> Any:
        opened.append(file.path)
        return files_open(self, file)

    monkeypatch.setattr(Files, "open", counting)
    assert sum(group.rows for group in IcebergSource(later).row_groups) == 18
    assert len([path for path in opened if path.endswith("deletes.parquet")]) == 1


def test_equality_deletes_are_refused_by_name(catalog: InMemoryCatalog) -> None:
    later = delete_rows(two_files(catalog), {"x": [1]}, DataFileContent.EQUALITY_DELETES)
    with pytest.raises(SourceError, match="equality deletes"):
        IcebergSource(later)
