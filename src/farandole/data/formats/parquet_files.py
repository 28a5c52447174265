"""Parquet files, their footers, and the reading of their row groups."""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data.formats.encryption import refuse_encrypted
from farandole.data.formats.fields import Field
from farandole.data.formats.file_systems import Files, FilesSource
from farandole.data.formats.old_times import has_old_times, is_julian, times_as_meant
from farandole.data.formats.parquet_summary import Footer, content_of, find_beside, footers_in, read_summary, spans_in
from farandole.data.formats.partitions import add_partitions, check_partitions, partition_fields, value_in_path
from farandole.data.formats.pruning import Bounds, bounded_kind
from farandole.data.formats.row_groups import File, RowGroup, RowGroups
from farandole.data.formats.schemas import CommonSchema, one_schema, with_types
from farandole.data.formats.source import convert
from farandole.data.loading.agreement import Gather, from_first, place_in, shared_out, together
from farandole.data.loading.values import ValuesOrLoose
from farandole.data.stores.ranges import Span
from farandole.data.stores.request_limiter import MOST_IN_FLIGHT
from farandole.masking import mask

log = logging.getLogger(__name__)

_OPENERS = 16
# Arrow takes three times the memory of a row group to decode it at once. One of this size is decoded in parts.
_LARGE_GROUP, _PART_BYTES = 32 << 20, 8 << 20
_STREAM_BYTES = 1 << 20  # read at a time from each column of a large row group
_OLD_WRITER = re.compile(r"parquet-mr version (0\.|1\.[0-2]\.)")


class ParquetFiles(FilesSource):
    """Parquet files that are read without a table's log; each is opened for its footer.

    Files that a `_metadata` file in their folder describes are not opened. Folders below `base` name columns.

    With `gather`, making it is collective: if a file cannot be opened on one rank, all ranks raise. They must get the
    same files of a store; each rank opens some of them, and the ranks exchange the footers. Raises `SourceError` for
    files that are not Parquet or are encrypted. Methods raise `DataError` for columns that differ between files."""

    def __init__(self, files: Files, listed: Sequence[File], base: str, gather: Gather | None = None) -> None:
        self._files, self._base = files, base
        opened = self._open_all(listed, gather)
        self._listed, footers = [file for file, _ in opened], [footer for _, footer in opened]
        self._footers = {file.path: footer for file, footer in zip(self._listed, footers, strict=True)}
        own = one_schema(self._listed, [footer.whole.schema.to_arrow_schema() for footer in footers])
        self._known_leaves: tuple[Sequence[str], pq.ParquetSchema, list[int]] | None = None  # of the latest footer
        self._schemas: dict[tuple[str, ...], pa.Schema] = {}
        paths = [file.path for file in self._listed]
        self._partitions, problems, self._doubled = partition_fields(paths, frozenset(own.schema.names), base)
        self._common = CommonSchema(pa.schema([*own.schema, *self._partitions]), {**own.problems, **problems})
        self.schema = self._common.schema
        rows = [footer.row_group(number).num_rows for footer in footers for number in range(footer.num_row_groups)]
        counts = [footer.num_row_groups for footer in footers]
        self.row_groups: Sequence[RowGroup] = RowGroups(self._listed, counts, rows)

    def beside(self, name: str) -> bytes | None:
        """Return the content of the file `name` in the folder of the files; None if there is none.

        Also None, with a warning, if the folder cannot be asked: the files may still be readable."""
        try:
            found = find_beside(self._files, self._base, name)
        except Exception as error:  # of any class, as the store's clients have them
            log.warning("%s/%s is left out: it cannot be looked for: %s", mask(self._base), name, mask(str(error)))
            return None
        return None if found is None else content_of(self._files, found)

    def nbytes(self, columns: Sequence[str]) -> int:
        """Return the sum of the columns' uncompressed sizes in the footers."""
        self._common.check(columns)
        total = 0
        for footer in self._footers.values():
            leaves = self._leaves(footer, columns)
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                if len(leaves) == footer.whole.num_columns:
                    total += group.total_byte_size
                else:
                    total += sum(group.column(leaf).total_uncompressed_size for leaf in leaves)
        return total

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Read these columns of a row group; raises `SourceError` naming the file."""
        return pa.concat_tables(self._tables(row_group, columns))

    def parts(
        self, row_group: RowGroup, fields: Sequence[Field], content: bytes | None = None
    ) -> Iterator[dict[str, ValuesOrLoose]]:
        """Yield the converted columns, those of a large row group in parts."""
        for table in self._tables(row_group, [field.name for field in fields]):
            yield convert(table, fields)

    def _tables(self, row_group: RowGroup, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows of a row group: all of them, or several tables that follow each other."""
        self._common.check(columns)
        partitions = [field for field in self._partitions if field.name in columns]
        held = [name for name in columns if all(name != field.name for field in partitions)]
        footer = self._footers[row_group.file.path]
        buffered = not self._files.local and self._files.client is None
        with self._files.fetching(row_group.file) as opened:
            opened.fetch(lambda: spans_in(footer.row_group(row_group.number), self._leaves(footer, held)))
            # Footers of old writers state too few bytes, so Arrow reads beyond the columns' ranges.
            old = _OLD_WRITER.match(footer.whole.created_by or "")
            stream = opened.stream if old else opened.fetched()
            number = footer.first + row_group.number
            part_rows = 0 if buffered else _part_rows(footer, row_group.number, self._leaves(footer, held))
            options: dict[str, bool | int] = {"pre_buffer": buffered, "page_checksum_verification": self._files.verify}
            if part_rows:
                options["buffer_size"] = _STREAM_BYTES
            with pq.ParquetFile(stream, metadata=footer.whole, **options) as parquet:
                for table in _decoded(parquet, number, held, part_rows):
                    table = times_as_meant(stream, footer.whole, [number], table, row_group.file.path)
                    if table.schema != self._schema_of(tuple(held)):
                        table = with_types(table, self.schema)
                    if self._doubled:
                        check_partitions(table, row_group.file.path, self._doubled, self._base)
                    yield add_partitions(table, row_group.file.path, partitions, self._base)
        if self._files.client is None:  # a client checks the file with each range
            self._files.check([row_group.file])

    def _leaves(self, footer: Footer, columns: Sequence[str]) -> list[int]:
        schema, known = footer.whole.schema, self._known_leaves
        # Most files have the same schema, and comparing schemas is faster than searching one.
        if known is None or known[0] != columns or not known[1].equals(schema):
            known = self._known_leaves = columns, schema, _leaves(footer.whole, set(columns))
        return known[2]

    def _leaf(self, footer: Footer, column: str) -> int:
        """Return the number of the leaf of a column that is not nested."""
        leaves = self._leaves(footer, [column])
        return next(leaf for leaf in leaves if footer.whole.schema.column(leaf).path == column)

    def _schema_of(self, columns: tuple[str, ...]) -> pa.Schema:
        if columns not in self._schemas:
            self._schemas[columns] = pa.schema([self.schema.field(name) for name in columns])
        return self._schemas[columns]

    def check(self) -> None:
        """Raise `SourceError` if a file has changed or vanished since it was opened.

        Does nothing for web servers, which have no listings: their files are checked when they are read."""
        if not (self._files.web and self._files.client is not None):
            super().check()

    def recheck(self) -> None:
        """Check each file, even if that takes a request per file; raises as `check` does."""
        super().check()

    def bounds(self, column: str) -> Bounds | None:
        """Return a column's bounds in each row group, from footers or folder names; None for types without bounds."""
        self._common.check([column])
        field = self.schema.field(column)
        if not bounded_kind(field.type):
            return None
        if field in self._partitions:
            found = [value_in_path(group.file.path, field, self._base) for group in self.row_groups]
            values = pa.array(found, field.type)
            nulls = [0 if value.is_valid else group.rows for value, group in zip(values, self.row_groups, strict=True)]
            return Bounds(values, values, np.array(nulls, np.int64))
        leaves = {path: self._leaf(footer, column) for path, footer in self._footers.items()}
        seen = [
            self._footers[group.file.path].row_group(group.number).column(leaves[group.file.path]).statistics
            for group in self.row_groups
        ]
        pairs = [(each.min, each.max) if each is not None and each.has_min_max else (None, None) for each in seen]
        if pa.types.is_temporal(field.type):  # statistics count days as the values do
            julian = {path for path, footer in self._footers.items() if is_julian(footer.whole)}
            pairs = [
                (None, None) if group.file.path in julian else pair
                for pair, group in zip(pairs, self.row_groups, strict=True)
            ]
        # NaN, which some writers record as the greatest value, is no bound.
        sound = [pair if pair[0] == pair[0] and pair[1] == pair[1] else (None, None) for pair in pairs]
        nulls = [each.null_count if each is not None and each.has_null_count else -1 for each in seen]
        least, most = (pa.array([pair[side] for pair in sound], field.type) for side in (0, 1))
        return Bounds(least, most, np.array(nulls, np.int64))

    def _open_all(self, listed: Sequence[File], gather: Gather | None) -> list[tuple[File, Footer]]:
        """Return each file, as it was when its footer was read, and the footer; collective with `gather`."""
        shared = self._files.client is not None

        look = partial(read_summary, self._files, listed)
        if shared and gather is not None:
            summary = from_first(look, gather, place_in(gather)[0])
        else:
            summary = together(look, gather)
        known = footers_in(summary, listed, local=self._files.local) if summary is not None else {}
        unknown = [file for file in listed if file.path not in known]
        opened = iter(shared_out(unknown, self._open_some, gather, shared=shared))
        return [(file, known[file.path]) if file.path in known else next(opened) for file in listed]

    def _open_some(self, listed: Sequence[File]) -> list[tuple[File, Footer]]:
        if self._files.local:
            return [self._open(file) for file in listed]
        openers = _OPENERS if self._files.client is None else MOST_IN_FLIGHT
        with ThreadPoolExecutor(openers, thread_name_prefix="farandole-open") as pool:
            return list(pool.map(self._open, listed))

    def _open(self, file: File) -> tuple[File, Footer]:
        with self._files.fetching(file) as opened:
            opened.fetch_tail()
            footer = pq.read_metadata(opened.stream)
            refuse_encrypted(opened.stream, footer, file.path)
            return opened.file, Footer(footer, 0, footer.num_row_groups)


def _decoded(parquet: pq.ParquetFile, number: int, columns: Sequence[str], part_rows: int) -> Iterator[pa.Table]:
    """Yield the rows of a row group; `part_rows` at a time, unless it is 0."""
    if not part_rows:
        yield parquet.read_row_group(number, columns=columns, use_threads=False)
        return
    for batch in parquet.iter_batches(part_rows, [number], columns=columns, use_threads=False):
        yield pa.Table.from_batches([batch])


def _part_rows(footer: Footer, number: int, leaves: Iterable[int]) -> int:
    """Return the number of rows to decode at a time; 0: all of them, because they are few or their times are old."""
    group = footer.row_group(number)
    if group.total_byte_size < _LARGE_GROUP:
        return 0
    nbytes: int = sum(group.column(leaf).total_uncompressed_size for leaf in leaves)
    if nbytes < _LARGE_GROUP or has_old_times(footer.whole):
        return 0
    rows: int = group.num_rows
    return max(1, rows * _PART_BYTES // nbytes)


def spans_of(footer: pq.FileMetaData, row_groups: Iterable[int], columns: Iterable[str]) -> list[Span]:
    """Return the byte ranges of these columns of row groups in their file."""
    leaves = _leaves(footer, set(columns))
    return [span for number in row_groups for span in spans_in(footer.row_group(number), leaves)]


def _leaves(footer: pq.FileMetaData, columns: set[str]) -> list[int]:
    """Return the numbers of these columns' leaves, and perhaps of some others.

    A leaf of nested column "a" has a path such as "a.list.element". A column's own name may have dots, too: asking for
    "a" then also returns the leaf of column "a.b".
    """
    found = []
    for leaf in range(footer.num_columns):
        path = str(footer.schema.column(leaf).path)
        while path not in columns and "." in path:
            path = path.rpartition(".")[0]
        if path in columns:
            found.append(leaf)
    return found
