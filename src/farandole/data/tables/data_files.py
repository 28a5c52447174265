"""Data files of a table at one version, in pieces of rows that are planned from the table's log alone.

A log lists the rows and bytes of each file, but not its row groups. So large files are cut into pieces by rows. A
loader treats a piece as a row group; reading a piece decodes the row groups that overlap it."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from farandole.data.formats.encryption import refuse_encrypted
from farandole.data.formats.file_systems import Files, FilesSource
from farandole.data.formats.old_times import times_as_meant
from farandole.data.formats.parquet_files import spans_of
from farandole.data.formats.pruning import Bounds, bounded_kind
from farandole.data.formats.row_groups import File, RowGroup, RowGroups, rows_in
from farandole.data.formats.schemas import is_binary, is_text
from farandole.data.stores.ranges import Span
from farandole.errors import DataError, SourceError

PIECE_BYTES = 64 << 20  # compressed bytes of a file per piece
WHOLE_BYTES = 1 << 20  # a remote file of at most this size is fetched whole, with one request
_OPENERS = 16
_FIELD_ID = b"PARQUET:field_id"
_TEXT_FACTOR = 4  # estimated bytes in memory per byte in a file, for types without a fixed width


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file of the table.

    rows: the number of rows in the file, including deleted ones; -1 if the log does not list it. constants: by name,
    the value of each column that has the same value in all rows. kept: a bit per row, False for a deleted row; None if
    no row is deleted. inexact: the other columns that have the same value in all rows, which only the file has."""

    file: File
    rows: int
    constants: Mapping[str, object]
    kept: NDArray[np.uint8] | None = None
    inexact: frozenset[str] = frozenset()

    def span(self, piece: int) -> tuple[int, int]:
        """Return the half-open range of rows of a piece."""
        count = self.pieces
        return piece * self.rows // count, (piece + 1) * self.rows // count

    @property
    def pieces(self) -> int:
        """The number of pieces of the file."""
        return max(1, min(self.rows, -(-self.file.size // PIECE_BYTES)))

    def mask(self, first: int, last: int) -> NDArray[np.bool_] | None:
        """Return for each row from `first` to `last` whether it is kept; None if the file has no deleted rows."""
        return None if self.kept is None else np.unpackbits(self.kept, count=self.rows)[first:last].astype(bool)


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """A column of the table, and the way to find it in a file.

    A file that has field ids holds the column under `field_id`, another file under one of `names`. In files without the
    column, its value is `default`. `problem` says why it cannot be read, if it cannot."""

    field: pa.Field
    names: tuple[str, ...]
    field_id: int | None = None
    default: object = None
    problem: str = ""

    def find(self, schema: pa.Schema, *, by_id: bool) -> pa.Field | None:
        """Return the field of a file's schema that holds the column; None if the file does not have it."""
        if by_id:
            return next((each for each in schema if _id_of(each) == self.field_id), None)
        return next((schema.field(name) for name in self.names if name in schema.names), None)


class TableSource(FilesSource):
    """Rows of a table at one version, from the files, row counts and columns that its log lists.

    `gone` is the error text for a file that no longer exists. Making a source opens only files whose row count the log
    does not list. Raises `SourceError` for files that differ from the log."""

    def __init__(self, files: Files, data: Sequence[DataFile], columns: Sequence[TableColumn], gone: str) -> None:
        self._files = replace(files, gone=gone)
        with ThreadPoolExecutor(_OPENERS, thread_name_prefix="farandole-open") as pool:
            counted = iter(list(pool.map(self._counted, [each for each in data if each.rows < 0])))
        self._data = tuple(next(counted) if each.rows < 0 else each for each in data)
        self._columns = {column.field.name: column for column in columns}
        self._listed = [each.file for each in self._data]
        self._by_path = {each.file.path: each for each in self._data}
        if len(self._by_path) < len(self._data):
            raise SourceError(self._data[0].file.path, "the table's log has a file twice")
        self._footers: dict[str, pq.FileMetaData] = {}  # of files in several pieces, and of remote files
        self.schema = pa.schema([column.field for column in columns])
        counts = [each.pieces for each in self._data]
        self.row_groups: Sequence[RowGroup] = RowGroups(self._listed, counts, self._sizes(counts))

    def _sizes(self, counts: Sequence[int]) -> NDArray[np.int64]:
        """Return the number of rows of each piece, without deleted rows."""
        of_file = np.repeat(np.arange(len(counts)), counts)
        pieces = np.array(counts, np.int64)
        starts = np.cumsum(pieces) - pieces
        number = np.arange(len(of_file)) - starts[of_file]
        rows = np.array([each.rows for each in self._data], np.int64)[of_file]
        sizes: NDArray[np.int64] = (number + 1) * rows // pieces[of_file] - number * rows // pieces[of_file]
        for place, each in enumerate(self._data):
            if each.kept is not None:
                first = int(starts[place])
                sizes[first : first + counts[place]] = [_count(each, piece) for piece in range(counts[place])]
        return sizes

    def nbytes(self, columns: Sequence[str]) -> int:
        """Estimate from the types' widths; for types without one, from the sizes of the files."""
        rows, held = int(rows_in(self.row_groups).sum()), sum(each.file.size for each in self._data)
        widths = {name: _width(column.field.type) for name, column in self._columns.items()}
        unknown = sum(width is None for width in widths.values())
        each_unknown = _TEXT_FACTOR * held // max(1, unknown)
        chosen = (widths[name] for name in columns)
        return sum(each_unknown if width is None else rows * width for width in chosen)

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Read these columns of a piece; raises `SourceError` naming the file, `DataError` naming the column."""
        data = self._by_path[row_group.file.path]
        first, last = data.span(row_group.number)
        with self._files.fetching(data.file) as opened:
            known = self._footers.get(data.file.path)
            if data.file.size <= WHOLE_BYTES or (data.pieces == 1 and len(columns) == len(self._columns)):
                opened.fetch(lambda: [Span(0, data.file.size)])  # data and footer in one request
            elif known is None:
                opened.fetch_tail()
            buffered = not self._files.local and opened.far is None
            options = {"pre_buffer": buffered, "page_checksum_verification": self._files.verify}
            with pq.ParquetFile(opened.stream, metadata=known, **options) as parquet:
                if known is None:
                    refuse_encrypted(opened.stream, parquet.metadata, data.file.path)
                if parquet.metadata.num_rows != data.rows:
                    problem = f"has {parquet.metadata.num_rows} rows, but {data.rows} in the table's log"
                    raise SourceError(data.file.path, problem)
                if data.pieces > 1 or self._files.client is not None:
                    self._footers[data.file.path] = parquet.metadata
                found = self._locate(data, parquet.schema_arrow, columns)
                names = [field.name for field in found.values() if field is not None]
                taken, skipped = _row_groups(parquet.metadata, first, last)
                opened.fetch(lambda: spans_of(parquet.metadata, taken, names))
                read = parquet.read_row_groups(taken, columns=names, use_threads=False) if names else None
                if read is not None:
                    read = times_as_meant(opened.stream, parquet.metadata, taken, read, data.file.path)
        read = None if read is None else read.slice(skipped, last - first)
        made = [self._make(name, found[name], read, data, last - first) for name in columns]
        table = pa.table(made, schema=pa.schema([self.schema.field(name) for name in columns]))
        mask = data.mask(first, last)
        return table if mask is None else table.filter(pa.array(mask))

    def check(self) -> None:
        """Raise `SourceError` if a local file has changed or vanished.

        Files of a table are written once, so remote files are not checked here; reading a missing one is an error."""
        if self._files.local:
            super().check()

    def bounds(self, column: str) -> Bounds | None:
        """Return a column's bounds in each piece, from the log; None if the log has none."""
        field = self.schema.field(column)
        if not bounded_kind(field.type):
            return None
        found = self._file_bounds(column)
        if found is None:
            return None
        least, most, nulls = found
        places = np.repeat(np.arange(len(self._data)), [each.pieces for each in self._data])
        # The log counts the nulls of a whole file, including those of rows that were deleted later.
        whole = np.array([each.pieces == 1 and each.kept is None for each in self._data], bool)
        counts = np.where(whole, nulls, -1)
        kind = field.type
        return Bounds(least.cast(kind).take(pa.array(places)), most.cast(kind).take(pa.array(places)), counts[places])

    def _file_bounds(self, column: str) -> tuple[pa.Array, pa.Array, NDArray[np.int64]] | None:
        """Return a column's least value, greatest value and count of nulls in each file; -1 for an unknown count."""
        values = [each.constants.get(column) for each in self._data]
        if not self._data or any(column not in each.constants for each in self._data):
            return None
        array = pa.array(values, self.schema.field(column).type)
        nulls = [0 if value is not None else each.rows for value, each in zip(values, self._data, strict=True)]
        return array, array, np.array(nulls, np.int64)

    def _counted(self, data: DataFile) -> DataFile:
        """Return the file with the number of rows that its footer has."""
        with self._files.open(data.file) as opened:
            return replace(data, rows=int(pq.read_metadata(opened).num_rows))

    def _locate(self, data: DataFile, schema: pa.Schema, names: Sequence[str]) -> dict[str, pa.Field | None]:
        columns = [self._columns[name] for name in names]
        for column in columns:
            if column.problem:
                raise DataError(column.field.name, column.problem)
        by_id = any(_id_of(field) is not None for field in schema)
        if not by_id and any(column.field_id is not None and not column.names for column in columns):
            raise SourceError(
                data.file.path, "has no field ids, and the table has no name mapping that tells which column is which"
            )
        ids = [column.field_id is not None and by_id for column in columns]
        return {
            column.field.name: None
            if column.field.name in data.constants and not has_id
            else column.find(schema, by_id=has_id)
            for column, has_id in zip(columns, ids, strict=True)
        }

    def _make(
        self, name: str, field: pa.Field | None, read: pa.Table | None, data: DataFile, rows: int
    ) -> pa.Array | pa.ChunkedArray:
        kind = self._columns[name].field.type
        if field is None or read is None:
            if name in data.inexact:
                problem = "is a partition of doubles, which pyiceberg does not read exactly"
                raise DataError(name, f"{problem}, and not in {data.file.path}; write the table anew with the column")
            value = data.constants.get(name, self._columns[name].default)
            return pa.repeat(pa.scalar(value, kind), rows)
        column = read[field.name]
        if not _same_ids(field.type, kind):
            changed = f"has fields that were dropped or added since {data.file.path} was written"
            raise DataError(name, f"{changed}, which is not supported; compact the table")
        if column.type == kind:
            return column
        if pa.types.is_null(column.type):
            return pa.nulls(rows, kind)
        problem = f"is {kind} in the table, but {field.type} in {data.file.path}"
        if not same_within(field.type, kind):
            raise DataError(name, problem)
        try:
            return column.cast(kind)
        except pa.ArrowException as error:
            raise DataError(name, f"{problem}: {error}") from error


def same_within(found: pa.DataType, asked: pa.DataType) -> bool:
    """Return whether a cast keeps all fields and values, or raises.

    Nested structs must have the same names in the same order."""
    if isinstance(found, pa.BaseExtensionType):
        return same_within(found.storage_type, asked)
    if pa.types.is_dictionary(found):
        return same_within(found.value_type, asked)
    if pa.types.is_struct(asked) or pa.types.is_struct(found):
        if not (pa.types.is_struct(asked) and pa.types.is_struct(found)) or found.num_fields != asked.num_fields:
            return False
        pairs = zip(found, asked, strict=True)
        return all(one.name == other.name and same_within(one.type, other.type) for one, other in pairs)
    if pa.types.is_map(asked) or pa.types.is_map(found):
        return bool(found == asked)
    lists = [bool(pa.types.is_nested(kind)) for kind in (found, asked)]
    if all(lists):
        return same_within(found.value_type, asked.value_type)
    return not any(lists) and _keeps(found, asked)


def _keeps(found: pa.DataType, asked: pa.DataType) -> bool:
    """Return whether a cast, which checks ranges, keeps each value or raises: it may not round, parse or cut values."""
    types = pa.types
    if types.is_floating(asked):
        return bool(types.is_integer(found) or (types.is_floating(found) and found.bit_width <= asked.bit_width))
    if types.is_timestamp(asked):
        return bool(types.is_timestamp(found) or types.is_date(found))
    if types.is_decimal(asked):
        return bool(types.is_integer(found) or types.is_decimal(found))
    families = (types.is_integer, types.is_date, types.is_time, types.is_duration, _is_bytes)
    return bool(found == asked or types.is_null(found)) or any(test(found) and test(asked) for test in families)


def _is_bytes(kind: pa.DataType) -> bool:
    return is_text(kind) or is_binary(kind) or bool(pa.types.is_fixed_size_binary(kind))


def _same_ids(found: pa.DataType, asked: pa.DataType) -> bool:
    """Return whether the fields of nested structs, as far as both types have them, have the same field ids."""
    for one, other in zip(_inner(found), _inner(asked), strict=False):
        ids = _id_of(one), _id_of(other)
        if (None not in ids and ids[0] != ids[1]) or not _same_ids(one.type, other.type):
            return False
    return True


def _inner(kind: pa.DataType) -> list[pa.Field]:
    if pa.types.is_struct(kind):
        return list(kind)
    return [kind.value_field] if pa.types.is_list(kind) or pa.types.is_large_list(kind) else []


def _id_of(field: pa.Field) -> int | None:
    text = (field.metadata or {}).get(_FIELD_ID)
    return None if text is None else int(text)


def _count(data: DataFile, piece: int) -> int:
    first, last = data.span(piece)
    mask = data.mask(first, last)
    return last - first if mask is None else int(mask.sum())


def _row_groups(footer: pq.FileMetaData, first: int, last: int) -> tuple[list[int], int]:
    """Return the row groups that overlap rows `first` to `last` (half-open), and how many of their rows to skip."""
    taken: list[int] = []
    start, passed = 0, 0
    for number in range(footer.num_row_groups):
        rows = footer.row_group(number).num_rows
        if passed < last and passed + rows > first:
            start = passed if not taken else start
            taken.append(number)
        passed += rows
    return taken, first - start


def _width(kind: pa.DataType) -> int | None:
    """Return the bytes of a value in memory; None for types whose values differ in size."""
    try:
        width = int(kind.bit_width)
    except ValueError:
        return None
    return max(1, width // 8)
