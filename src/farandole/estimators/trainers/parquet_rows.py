"""A rank's share of the rows in Parquet files, in the layout in which a DataFrame's rows are fed to it."""

import hashlib
import json
import os
import posixpath
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from farandole.data import ParquetSource, Source
from farandole.data.formats.fields import is_vector
from farandole.data.loading.state import NO_VERSION
from farandole.errors import DataError, SourceError
from farandole.estimators.trainers.arrow_columns import filled_up, vector_widths
from farandole.estimators.trainers.row_hash import hash_rows, partition_of
from farandole.estimators.trainers.rows import HASH, VALIDATES, fed_as
from farandole.spark.rows.disks import local_directory
from farandole.spark.rows.spill import Spill, spill

_NUMBERS_AT_ONCE = 1 << 24  # of a column of vectors, as dense arrays


@dataclass(frozen=True, kw_only=True)
class ParquetFolder:
    """A folder of Parquet files or of a table, with a digest of the files that the driver has found there."""

    url: str
    version: int | None  # of the table; None: plain files
    content: str  # digest of the files' names, sizes and row groups

    @classmethod
    def of(cls, url: str, source: ParquetSource) -> "ParquetFolder":
        """Record the files that `source` has found under its URL."""
        return cls(url=url, version=None if source.version == NO_VERSION else source.version, content=_content(source))

    def open(self, options: Mapping[str, object]) -> ParquetSource:
        """Open the folder; raises `SourceError` if its files are not those that the driver has found."""
        source = ParquetSource(self.url, options, version=self.version)
        if _content(source) != self.content:
            raise SourceError(
                self.url,
                f"does not have the files on {socket.gethostname()} that the driver saw when the fit began; use a "
                "store that is the same on every host, and write to the folder when no fit reads it",
            )
        return source


@dataclass(frozen=True, kw_only=True)
class ParquetRows:
    """The files that ranks read; the same on every rank.

    The rows of `held` are for validation. Without it, those for which the column `validation_col` of `train` is true
    are, if it is set.
    """

    train: ParquetFolder
    held: ParquetFolder | None
    storage_options: Mapping[str, object] = field(repr=False)
    columns: tuple[str, ...]
    as_they_are: frozenset[str]  # columns that keep their types
    validation_col: str | None
    by_content: bool = False  # a row's hash decides which rank gets it; each rank reads all files


def lay_out(rows: ParquetRows, *, rank: int, size: int) -> Spill:
    """Read this rank's share of the rows, row group by row group, into a file without a name.

    With `rows.by_content` a rank reads all files and keeps the rows that hash to it. Otherwise it reads only the row
    groups of its share, which may begin and end within a row group; shares differ by at most one row. Raises
    `SourceError` for files that cannot be read, `DataError` for a column."""
    train = rows.train.open(rows.storage_options)
    parts: list[tuple[Source, bool | None]] = [(train, None if rows.held is None else False)]
    if rows.held is not None:
        parts.append((rows.held.open(rows.storage_options), True))

    def batches() -> Iterator[pa.RecordBatch]:
        for source, validates in parts:
            share = (0, 1) if rows.by_content else (rank, size)
            for table in _share(source, _names(rows, validates), *share):
                for piece in _pieces(rows, table):
                    made = _fed(rows, piece, validates)
                    if rows.by_content:
                        made = made.filter(pa.array(partition_of(made[HASH].to_numpy(), size) == rank))
                    yield from made.to_batches()

    names = _names(rows, parts[0][1])
    empty = train.schema.empty_table().select(names)
    schema = _fed(rows, empty, parts[0][1]).schema
    return spill(batches(), schema, local_directory(os.environ, rank), stop=lambda: False)


def _content(source: Source) -> str:
    seen = [
        [posixpath.basename(group.file.path), group.file.size, group.number, group.rows] for group in source.row_groups
    ]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def _pieces(rows: ParquetRows, table: pa.Table) -> Iterator[pa.Table]:
    """Yield slices of a table that take little memory when their vectors are made dense."""
    columns = [table[name] for name in rows.columns]
    widths = [max(vector_widths(_one_array(each)), default=1) for each in columns if is_vector(each.type)]
    at_once = max(1, _NUMBERS_AT_ONCE // max([1, *widths]))
    for first in range(0, table.num_rows, at_once):
        yield table.slice(first, at_once)


def _names(rows: ParquetRows, validates: bool | None) -> list[str]:
    chosen = [] if validates is not None or rows.validation_col is None else [rows.validation_col]
    return list(dict.fromkeys([*rows.columns, *chosen]))


def _share(source: Source, names: Sequence[str], rank: int, size: int) -> Iterator[pa.Table]:
    total = sum(group.rows for group in source.row_groups)
    first, last = (total * place // size for place in (rank, rank + 1))
    begin = 0
    for group in source.row_groups:
        end = begin + group.rows
        if begin < last and first < end:
            table = source.read(group, names)
            start = max(0, first - begin)
            yield table.slice(start, min(end, last) - begin - start).combine_chunks()
        begin = end


def _fed(rows: ParquetRows, table: pa.Table, validates: bool | None) -> pa.Table:
    """Return the rows with the names and types of a feed."""
    columns = [
        _one_array(table[name]) if name in rows.as_they_are else fed_column(name, table[name]) for name in rows.columns
    ]
    made = {fed_as(place): column for place, column in enumerate(columns)}
    # Equal vectors can be sparse or dense in the file, so their hash is that of lists of numbers.
    plain = zip(rows.columns, columns, strict=True)
    made[HASH] = pa.array(hash_rows([_as_lists(name, each) if is_vector(each.type) else each for name, each in plain]))
    if validates is not None:
        made[VALIDATES] = pa.array(np.full(table.num_rows, validates, np.int8))
    elif rows.validation_col is not None:
        chosen = _one_array(table[rows.validation_col]).cast(pa.int64())
        made[VALIDATES] = pc.not_equal(chosen, 0).cast(pa.int8())
    return pa.table(made)


def fed_column(name: str, column: pa.ChunkedArray) -> pa.Array:
    """Return a column as numbers or lists of numbers: vectors become lists of double, booleans 0 and 1."""
    whole = _one_array(column)
    kind = whole.type
    if pa.types.is_boolean(kind):
        return whole.cast(pa.int8())
    if pa.types.is_fixed_size_list(kind) or (pa.types.is_list(kind) and pa.types.is_boolean(kind.value_type)):
        numbers = pa.int8() if pa.types.is_boolean(kind.value_type) else kind.value_type
        return whole.cast(pa.list_(numbers))
    return _as_lists(name, whole) if is_vector(kind) else whole


def _as_lists(name: str, vectors: pa.StructArray) -> pa.Array:
    """Return vectors as lists of numbers; nulls stay null."""
    there = vectors.drop_null()
    widths = vector_widths(there)
    if len(set(widths)) > 1:
        raise DataError(name, f"vectors of {min(widths)} to {max(widths)} numbers; a tensor needs one length")
    width = widths[0] if widths else 0
    values = filled_up(name, there, width)
    valid = np.asarray(vectors.is_valid())
    offsets = np.concatenate([[0], np.cumsum(valid * width)]).astype(np.int32)
    mask = None if valid.all() else pa.array(~valid)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1)), mask=mask)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole
