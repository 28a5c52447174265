"""Iceberg tables: files, rows, bounds and deleted rows of one snapshot, which pyiceberg reads from the metadata."""

import hashlib
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.arrow import ArrowFSWrapper
from numpy.typing import NDArray

from farandole.data.formats.file_systems import Files
from farandole.data.formats.places import Place, text_of
from farandole.data.formats.row_groups import File
from farandole.data.stores.urls import open_url
from farandole.data.tables.data_files import DataFile, TableColumn, TableSource
from farandole.data.tables.versions import check_asked
from farandole.errors import FarandoleError, SourceError
from farandole.extras import importing
from farandole.masking import hide_cause, mask, secret_values

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile as Entry
    from pyiceberg.schema import Schema
    from pyiceberg.table import FileScanTask, Table
    from pyiceberg.types import PrimitiveType

_NUMBERED = re.compile(r"v?(\d+)(?:-[^/]*)?(?:\.gz)?\.metadata\.json(?:\.gz)?")
_HINT = "version-hint.text"

Positions: TypeAlias = Sequence[pa.Array]


class IcebergSource(TableSource):
    """Rows of an Iceberg table at one snapshot: the current one, the one with id `snapshot`, or that of `timestamp`.

    `table` is a table of a pyiceberg catalog, or the URL of its folder or of a metadata file. In a folder, the version
    hint names the metadata file. Without a hint it is the file with the highest number, although only a catalog knows
    whether that one was committed. `timestamp` is UTC if it is naive. `options` are the file system's; a catalog's
    table has its own. `opened` is the URL's store, if it has been opened. Making a source reads metadata, manifests and
    files of deleted rows. Raises `SourceError` for a folder without a table, a snapshot that is gone, and a feature
    that is not supported, which it names; `MissingExtra` without pyiceberg.
    """

    def __init__(
        self,
        table: "Place | Table",
        *,
        snapshot: int | None = None,
        timestamp: datetime | None = None,
        options: Mapping[str, object] | None = None,
        opened: Files | None = None,
    ) -> None:
        check_asked("snapshot", snapshot, timestamp)
        with importing("farandole.data"):
            from pyiceberg.table import Table
        if not isinstance(table, Table):
            table = text_of(table)
        self._asked, self._options = table, options
        self._name = table if isinstance(table, str) else ".".join(table.name())
        files, found = _open(table, options or {}, opened)
        with _translating(self._name, secret_values(options or {})):
            self._version = _choose(self._name, found, snapshot, timestamp)
            # As in pyiceberg, a requested snapshot has its own schema, and the current one has the newest schema.
            newest = snapshot is None and timestamp is None
            scan = found.scan(snapshot_id=None if newest else self._version)
            self._schema = scan.projection()
            columns = _columns(self._name, found, self._schema)
            tasks = sorted(scan.plan_files(), key=lambda task: task.file.file_path)
            self._entries = [task.file for task in tasks]
            deleted = cache(partial(_deleted, files))  # a file of deleted rows may belong to many files of data
            data = [self._data_file(found, files, task, columns, deleted) for task in tasks]
        gone = (
            f"is not there: snapshot {self._version} of {mask(self._name)} was expired, or the file removed by hand; "
            "open a newer snapshot"
        )
        super().__init__(files, data, columns, gone)

    def __getstate__(self) -> dict[str, object]:
        """Leave out a catalog's table, which may hold connections; a copy in another process reads this snapshot."""
        return self.__dict__ | {"_asked": self._name}

    @property
    def version(self) -> int:
        """The id of the snapshot that is read."""
        return self._version

    def at(self, version: int) -> "IcebergSource":
        """Open another snapshot; raises `SourceError` if the table no longer has it."""
        table = self._asked if isinstance(self._asked, str) else self._asked.refresh()
        return IcebergSource(table, snapshot=version, options=self._options, opened=replace(self._files, gone=""))

    def _data_file(
        self,
        table: "Table",
        files: Files,
        task: "FileScanTask",
        columns: Sequence[TableColumn],
        deleted: Callable[["Entry"], Mapping[str, Positions]],
    ) -> DataFile:
        entry = task.file
        if entry.file_format.value != "PARQUET":
            raise SourceError(entry.file_path, f"is a file of {entry.file_format.value}, which is not supported")
        bits, mark = None, ""
        if task.delete_files:
            bits = _kept(entry, map(deleted, task.delete_files))
            mark = hashlib.sha256(bits.tobytes()).hexdigest()[:16]
        layout = hashlib.sha256(repr([(column.field, column.field_id) for column in columns]).encode()).hexdigest()[:8]
        # Names of data files are never reused, so path, schema and deleted rows identify the rows.
        file = File(files.place(entry.file_path), entry.file_size_in_bytes, f"{layout} {mark}".strip())
        constants = dict(_identity_partitions(table, entry, columns))
        # pyiceberg reads doubles in manifests as floats: 0.1 as 0.10000000149.
        doubles = {name for name, value in constants.items() if value.is_valid and pa.types.is_float64(value.type)}
        exact = {name: value for name, value in constants.items() if name not in doubles}
        return DataFile(file, entry.record_count, exact, bits, frozenset(doubles))

    def _file_bounds(self, column: str) -> tuple[pa.Array, pa.Array, NDArray[np.int64]] | None:
        from pyiceberg.types import PrimitiveType

        field = self._schema.find_field(column)
        assert isinstance(field.field_type, PrimitiveType), "only those have bounds"
        kind = self._columns[column].field.type
        sides = []
        for side in ("lower_bounds", "upper_bounds"):
            raws = [(getattr(entry, side) or {}).get(field.field_id) for entry in self._entries]
            found = [_value(field.field_type, raw) for raw in raws]
            sides.append(_array(found, kind))
        nulls = [(entry.null_value_counts or {}).get(field.field_id, -1) for entry in self._entries]
        return sides[0], sides[1], np.array(nulls, np.int64)


@contextmanager
def _translating(name: str, secrets: Sequence[str]) -> Iterator[None]:
    """Turn errors of the body into a `SourceError`; pyiceberg, catalogs and stores have error classes of their own."""
    try:
        yield
    except FarandoleError:
        raise
    except Exception as error:
        text = mask(f"cannot be opened as an Iceberg table: {error}", *secrets)
        raise SourceError(name, text) from hide_cause(error, *secrets)


def _open(table: "str | Table", options: Mapping[str, object], opened: Files | None) -> tuple[Files, "Table"]:
    """Return the file system of a table, `opened` for a URL if it is given, and pyiceberg's object for the table."""
    if not isinstance(table, str):
        return Files(_file_system(table)), table
    from pyiceberg.catalog.noop import NoopCatalog
    from pyiceberg.serializers import FromInputFile
    from pyiceberg.table import StaticTable

    # A subclass of pyiceberg's class, so that its module needs that package.
    from farandole.data.tables.iceberg_io import FsspecIO

    files, place = opened or Files.at(table, options), open_url(table, options)[1]
    with _translating(table, secret_values(options)):
        path = place if place.endswith(".metadata.json") else _newest_metadata(files, table, place)
        io = FsspecIO(files)
        metadata = FromInputFile.table_metadata(io.new_input(path))
        return files, StaticTable(("table",), metadata, path, io, NoopCatalog("folder"))


def _file_system(table: "Table") -> fsspec.AbstractFileSystem:
    """Return the file system of a catalog's table, which has the catalog's credentials."""
    from pyiceberg.io.pyarrow import PyArrowFileIO

    parts = urlsplit(table.metadata_location)
    scheme = parts.scheme or "file"
    if scheme == "file":
        return open_url("/", {})[0]
    if isinstance(table.io, PyArrowFileIO):
        return ArrowFSWrapper(table.io.fs_by_scheme(scheme, parts.netloc))
    get: Callable[[str], fsspec.AbstractFileSystem] | None = getattr(table.io, "get_fs", None)
    if get is None:
        raise SourceError(table.metadata_location, f"is read by {type(table.io).__name__}, which is not supported")
    return get(scheme)


def _newest_metadata(files: Files, url: str, folder: str) -> str:
    """Return the metadata file that the folder's version hint names, or the one with the highest number.

    A hint that is a number may be late: writers without a catalog write the numbered file first."""
    notes = posixpath.join(folder, "metadata")
    hint = ""
    if files.exists(posixpath.join(notes, _HINT)):
        hint = files.content(posixpath.join(notes, _HINT)).decode().strip()
        if not hint.isdigit():
            return posixpath.join(notes, f"{hint.removesuffix('.metadata.json')}.metadata.json")
    numbered: dict[int, list[str]] = {}
    for path in files.paths_in(notes):
        found = _NUMBERED.fullmatch(posixpath.basename(path))
        if found is not None and (found[0].startswith("v") or not hint):
            numbered.setdefault(int(found[1]), []).append(path)
    if hint and int(hint) not in numbered:
        raise SourceError(url, f"has no metadata file of version {hint}, which its {_HINT} names")
    if not numbered:
        raise SourceError(url, "has no metadata file")
    number = int(hint) if hint else max(numbered)
    while number + 1 in numbered:
        number += 1
    newest = numbered[number]
    if len(newest) > 1:
        named = " and ".join(sorted(posixpath.basename(path) for path in newest))
        raise SourceError(
            url,
            f"has several newest metadata files, {named}; only the catalog knows which was committed: pass "
            "IcebergSource the catalog's table, or the URL of the file",
        )
    return str(newest[0])


def _choose(name: str, table: "Table", snapshot: int | None, timestamp: datetime | None) -> int:
    found = table.current_snapshot()
    if snapshot is not None:
        found = table.snapshot_by_id(snapshot)
        if found is None:
            raise SourceError(name, f"has no snapshot {snapshot}; it was expired, or is another table's")
    elif timestamp is not None:
        asked = timestamp if timestamp.tzinfo else timestamp.replace(tzinfo=UTC)
        found = table.snapshot_as_of_timestamp(int(asked.timestamp() * 1000))
        if found is None:
            raise SourceError(name, f"has no snapshot of {asked} or before")
    if found is None:
        raise SourceError(name, "has no snapshot: nothing was written to the table yet")
    return int(found.snapshot_id)


def _columns(name: str, table: "Table", schema: "Schema") -> list[TableColumn]:
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    mapping = table.name_mapping()
    names = {} if mapping is None else {each.field_id: tuple(each.names) for each in mapping.root}
    return [
        TableColumn(
            field=pa.field(field.name, _plain(name, field.name, arrow.type)),
            names=names.get(field.field_id, ()),
            field_id=field.field_id,
            default=field.initial_default,
        )
        for field, arrow in zip(schema.fields, schema_to_pyarrow(schema), strict=True)
    ]


def _plain(table: str, column: str, kind: pa.DataType) -> pa.DataType:
    """Return the type with 32-bit offsets, which suffice for a piece of a table."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(_plain_field(table, column, kind.value_field))
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(table, column, each) for each in kind])
    if pa.types.is_map(kind):
        return pa.map_(_plain(table, column, kind.key_type), _plain(table, column, kind.item_type))
    return kind


def _plain_field(table: str, column: str, field: pa.Field) -> pa.Field:
    return pa.field(field.name, _plain(table, column, field.type), metadata=field.metadata)  # with its field id


def _identity_partitions(
    table: "Table", entry: "Entry", columns: Sequence[TableColumn]
) -> Iterator[tuple[str, pa.Scalar]]:
    """Yield name and value of each column that the partition makes constant in a file; the file may lack the column."""
    from pyiceberg.transforms import IdentityTransform

    by_id = {column.field_id: column for column in columns}
    for place, part in enumerate(table.specs()[entry.spec_id].fields):
        column = by_id.get(part.source_id)
        if column is not None and isinstance(part.transform, IdentityTransform):
            yield column.field.name, _array([entry.partition[place]], column.field.type)[0]


def _kept(entry: "Entry", deleted: Iterable[Mapping[str, Positions]]) -> NDArray[np.uint8]:
    """Return a bit per row of a data file, False for the rows that `deleted`, results of `_deleted`, delete."""
    kept = np.ones(entry.record_count, bool)
    for each in deleted:
        for part in each.get(entry.file_path, ()):
            kept[part.to_numpy(zero_copy_only=False)] = False
    return np.packbits(kept)


def _deleted(files: Files, entry: "Entry") -> Mapping[str, Positions]:
    """Return the positions of the rows that a file of deleted rows deletes, by the paths of files of data."""
    if entry.content.name != "POSITION_DELETES":
        raise SourceError(entry.file_path, "holds equality deletes, which are not supported; compact the table")
    place = File(files.place(entry.file_path), entry.file_size_in_bytes, "")
    if entry.file_format.value == "PUFFIN":
        return _deletion_vectors(files, place)
    if entry.file_format.value != "PARQUET":
        problem = f"holds deleted rows as {entry.file_format.value}, which is not supported; compact the table"
        raise SourceError(entry.file_path, problem)
    with files.open(place) as opened:
        read = pq.read_table(opened, columns=["file_path", "pos"])
    found = read.group_by("file_path").aggregate([("pos", "list")])
    return {path.as_py(): [rows.values] for path, rows in zip(found["file_path"], found["pos_list"], strict=True)}


def _deletion_vectors(files: Files, place: File) -> Mapping[str, Positions]:
    from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
    from pyiceberg.table.puffin import PuffinFile

    with files.open(place) as opened:
        puffin = PuffinFile(opened.read())
    found: dict[str, list[pa.Array]] = {}
    for each in deletion_vectors_from_puffin_file(puffin):
        found.setdefault(each.referenced_data_file, []).extend(each.to_vector().chunks)
    return found


def _value(kind: "PrimitiveType", raw: bytes | None) -> object:
    """Return the value of a bound; None if it is unknown, NaN, or of a date in a column of times.

    It has the narrower type if the column was widened after the file was written."""
    from pyiceberg.conversions import from_bytes
    from pyiceberg.types import DoubleType, FloatType, IntegerType, LongType, TimestampType

    if raw is None:
        return None
    if len(raw) == 4 and isinstance(kind, DoubleType | LongType):
        kind = FloatType() if isinstance(kind, DoubleType) else IntegerType()
    dates = len(raw) == 4 and isinstance(kind, TimestampType)  # a date does not become a time with a zone
    value = None if dates else from_bytes(kind, raw)
    return value if value == value else None  # NaN, which some writers record as the greatest value, is no bound


def _array(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """Make an array of Iceberg's values, where dates are days and times are microseconds since 1970."""
    whole = all(value is None or isinstance(value, int) for value in values)
    if whole and pa.types.is_temporal(kind):
        return pa.array(values, pa.int32() if pa.types.is_date32(kind) else pa.int64()).cast(kind)
    return pa.array(values, kind)
