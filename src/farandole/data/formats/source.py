"""Sources of rows: row groups in a fixed order, and the ways to read them.

Imports no module that reads files: ranks that get a DataFrame's rows start without those."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from farandole.data.formats.fields import Field
from farandole.data.formats.pruning import Bounds
from farandole.data.formats.row_groups import RowGroup, rows_in
from farandole.data.loading.state import NO_VERSION
from farandole.data.loading.values import ValuesOrLoose
from farandole.errors import ConfigError

LEAST_WINDOW = 64  # rows; a smaller window would mix rows badly


class Source(ABC):
    """Row groups in a fixed order, and methods to read them from any thread. Can be pickled.

    `schema` has names and types of all columns; `row_groups` are all row groups, sorted by path and number."""

    schema: pa.Schema
    row_groups: Sequence[RowGroup]

    @abstractmethod
    def nbytes(self, columns: Sequence[str]) -> int:
        """Estimate the bytes of memory that these columns of all row groups take."""

    @abstractmethod
    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Read these columns into memory that the source does not reuse; raises `SourceError` naming the file."""

    @abstractmethod
    def check(self) -> None:
        """Raise `SourceError` if a file has changed or vanished since it was opened.

        May omit files that are checked when they are read."""

    def recheck(self) -> None:
        """Check all files, for rows that will not be read from them again; raises as `check` does."""
        self.check()

    def contents(self, row_groups: Sequence[RowGroup]) -> Sequence[bytes | None]:
        """Return the bytes of each row group, read together, for `columns`; None for those that it reads by itself."""
        return [None] * len(row_groups)

    def columns(
        self, row_group: RowGroup, fields: Sequence[Field], content: bytes | None = None
    ) -> dict[str, ValuesOrLoose]:
        """Read and convert columns, from `content` if `contents` returned it; raises as `read` and `Field.values`."""
        return convert(self.read(row_group, [field.name for field in fields]), fields)

    def parts(
        self, row_group: RowGroup, fields: Sequence[Field], content: bytes | None = None
    ) -> Iterator[dict[str, ValuesOrLoose]]:
        """Yield the rows of `columns`: all at once, or a part at a time if that takes less memory."""
        yield self.columns(row_group, fields, content)

    def identity(self, row_group: RowGroup) -> str:
        """Return what tells the rows of a row group from those that other sources make of the same file.

        Sources that choose or decode rows override it."""
        return ""

    @property
    def choice(self) -> str:
        """Return an identifier of the rows that a condition has chosen; empty without a condition."""
        return ""

    def bounds(self, column: str) -> Bounds | None:
        """Return the column's bounds in all row groups, None if it has none; reads no file."""
        return None

    @property
    def version(self) -> int:
        """The version of the table that is read; `NO_VERSION` for other data."""
        return NO_VERSION

    def at(self, version: int) -> "Source":
        """Open another version of the same table, with the same settings.

        Raises `SourceError` if it is gone, `ConfigError` for data without versions."""
        raise ConfigError("version", f"is {version}, and this data has no versions")

    @property
    def in_flight(self) -> int:
        """The number of row groups to read at a time, for the current latency of a store.

        0 for local files, where the number of workers decides. It is looked up several times per row group."""
        return 0

    @property
    def least_window(self) -> int:
        """The least number of rows of a lane that are shuffled together.

        If it is less than `LEAST_WINDOW`, rounds are not made larger to mix the rows of many row groups."""
        return LEAST_WINDOW


class DerivedSource(Source):
    """Rows of another source, `source`: of all its row groups, or of `row_groups`.

    Answers as `source` does, but reads tables only, by `read`."""

    def __init__(self, source: Source, row_groups: Sequence[RowGroup] | None = None) -> None:
        self._source, self.schema = source, source.schema
        self.row_groups = source.row_groups if row_groups is None else row_groups

    def nbytes(self, columns: Sequence[str]) -> int:
        """Return the source's estimate; for a choice of its row groups the share of their rows in it."""
        if self.row_groups is self._source.row_groups:
            return self._source.nbytes(columns)
        rows, whole = (int(rows_in(each).sum()) for each in (self.row_groups, self._source.row_groups))
        return self._source.nbytes(columns) * rows // max(1, whole)

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Read these columns; raises `SourceError` naming the file."""
        return self._source.read(row_group, columns)

    def parts(
        self, row_group: RowGroup, fields: Sequence[Field], content: bytes | None = None
    ) -> Iterator[dict[str, ValuesOrLoose]]:
        """Yield the source's parts, unless a subclass has its own `read` or `columns`."""
        kind = type(self)
        if kind.read is DerivedSource.read and kind.columns is Source.columns:
            return self._source.parts(row_group, fields, content)
        return super().parts(row_group, fields, content)

    def check(self) -> None:
        """Check the source."""
        self._source.check()

    def recheck(self) -> None:
        """Check all files of the source."""
        self._source.recheck()

    def identity(self, row_group: RowGroup) -> str:
        """Return the source's identity of the row group."""
        return self._source.identity(row_group)

    @property
    def choice(self) -> str:
        """Return the source's identifier of the rows that a condition has chosen."""
        return self._source.choice

    def bounds(self, column: str) -> Bounds | None:
        """Return the source's bounds of a column; None for a choice of its row groups."""
        return self._source.bounds(column) if self.row_groups is self._source.row_groups else None

    @property
    def version(self) -> int:
        """The version of the table that the source reads; `NO_VERSION` if it reads none."""
        return self._source.version

    @property
    def in_flight(self) -> int:
        """The number of row groups of the source to read at a time."""
        return self._source.in_flight

    @property
    def least_window(self) -> int:
        """The least window of the source."""
        return self._source.least_window


def convert(table: pa.Table, fields: Iterable[Field]) -> dict[str, ValuesOrLoose]:
    """Convert the columns of a table; raises as `Field.values` does."""
    return {field.name: field.values(table[field.name]) for field in fields}
