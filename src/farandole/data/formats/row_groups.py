"""Row groups of files, and the protocol of sources that read them.

Imports no module that reads files: ranks that get a DataFrame's rows start without those."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import eq
from typing import Protocol, overload, runtime_checkable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from farandole.masking import mask

__all__ = [
    "File",
    "Rechecked",
    "RowGroup",
    "RowGroups",
    "Source",
    "contents_of",
    "fingerprint",
    "identity_of",
    "in_flight",
    "least_window",
    "mixes",
    "recheck",
    "rows_in",
]

_LEAST_WINDOW = 64  # rows; a smaller window would mix rows badly


@dataclass(frozen=True, slots=True)
class File:
    """A file as it was listed; `size` is in bytes, `mark` is its modification time or the store's version of it."""

    path: str
    size: int
    mark: str

    def __repr__(self) -> str:
        return f"File({mask(self.path)!r}, {self.size}, {self.mark!r})"


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Consecutive rows that are read together; `number` is the row group's index in its file."""

    file: File
    number: int
    rows: int

    def __str__(self) -> str:
        return f"row group {self.number} of {mask(self.file.path)}"


class RowGroups(Sequence[RowGroup]):
    """Sequence of the row groups of `files`: file i has `counts[i]`; `rows` has the number of rows of each row group.

    A row group takes 8 bytes; its `RowGroup` object is made on access."""

    def __init__(self, files: Sequence[File], counts: Sequence[int], rows: Sequence[int] | NDArray[np.int64]) -> None:
        self.files = files
        self.rows: NDArray[np.int64] = np.asarray(rows, np.int64)
        self._ends: NDArray[np.int64] = np.cumsum(np.asarray(counts, np.int64))
        assert len(self.rows) == (self._ends[-1] if len(self._ends) else 0), "every row group belongs to a file"

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> RowGroup: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[RowGroup]: ...
    def __getitem__(self, place: int | slice) -> RowGroup | Sequence[RowGroup]:
        if isinstance(place, slice):
            return tuple(self[each] for each in range(*place.indices(len(self))))
        at = range(len(self))[place]
        rows, ends = self.rows.data, self._ends.data  # single numbers are found faster than in arrays
        file = bisect_right(ends, at)
        return RowGroup(self.files[file], at - (ends[file - 1] if file else 0), rows[at])

    def __iter__(self) -> Iterator[RowGroup]:
        first = 0
        for file, end in zip(self.files, self._ends.tolist(), strict=True):
            for number, rows in enumerate(self.rows[first:end].tolist()):
                yield RowGroup(file, number, rows)
            first = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RowGroups({len(self)} of {len(self.files)} files)"


class Source(Protocol):
    """Row groups in a fixed order, and methods to read them from any thread. Can be pickled."""

    @property
    def schema(self) -> pa.Schema:
        """Names and types of all columns."""
        ...

    @property
    def row_groups(self) -> Sequence[RowGroup]:
        """All row groups, sorted by path and number."""
        ...

    def nbytes(self, columns: Sequence[str]) -> int:
        """Estimate the bytes of memory that these columns of all row groups take."""
        ...

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Read these columns into memory that the source does not reuse; raises `SourceError` naming the file."""
        ...

    def check(self) -> None:
        """Raise `SourceError` if a file has changed or vanished since it was opened."""
        ...


@runtime_checkable
class Rechecked(Protocol):
    """A source whose `check` omits files that are checked when they are read."""

    def recheck(self) -> None:
        """Look at all files; raises as `check` does."""
        ...


def in_flight(source: Source) -> int:
    """Return how many row groups of `source` to read at a time, for the current latency of its store.

    Sources of remote files have this property. For local files, returns 0: the number of workers decides."""
    # Not a check of a protocol, which takes 20 microseconds: this is called several times for each row group.
    found: int = getattr(source, "in_flight", 0)
    return found


def least_window(source: Source) -> int:
    """Return the least number of rows of a lane that are shuffled together.

    Sources whose rows need little shuffling within lanes have this property."""
    found: int = getattr(source, "least_window", _LEAST_WINDOW)
    return found


def mixes(source: Source) -> bool:
    """Return whether rounds are made larger to mix the rows of many row groups."""
    return least_window(source) >= _LEAST_WINDOW


def identity_of(source: Source, row_group: RowGroup) -> str:
    """Return what distinguishes the rows of a row group from those that other sources make of the same file.

    Sources that choose or decode rows have a method `identity` for that. For others, returns ""."""
    identity: Callable[[RowGroup], str] | None = getattr(source, "identity", None)
    return "" if identity is None else identity(row_group)


def contents_of(source: Source, row_groups: Sequence[RowGroup]) -> Sequence[bytes | None]:
    """Return the bytes of each row group, read together, for `source.columns`; None for those it reads by itself.

    Sources of small files have a method `contents` for that."""
    contents: Callable[[Sequence[RowGroup]], Sequence[bytes | None]] | None = getattr(source, "contents", None)
    return [None] * len(row_groups) if contents is None else contents(row_groups)


def recheck(source: Source) -> None:
    """Check all files of `source`; for rows that will not be read from the files again."""
    if isinstance(source, Rechecked):
        source.recheck()
    else:
        source.check()


def rows_in(row_groups: Sequence[RowGroup]) -> NDArray[np.int64]:
    """Return the number of rows of each row group."""
    if isinstance(row_groups, RowGroups):
        return row_groups.rows
    return np.fromiter((group.rows for group in row_groups), np.int64, len(row_groups))


def fingerprint(row_groups: Sequence[RowGroup], *, of_table: bool) -> int:
    """Return a number that identifies these row groups in a loader's state by their sizes, independent of their paths.

    For a table it also depends on the files' marks, which identify columns and deleted rows and stay the same if the
    table is moved."""
    if not of_table:
        text = ", ".join(map(str, rows_in(row_groups).tolist()))
    else:
        spell = lru_cache(json.dumps)  # row groups of one file follow each other
        text = ", ".join(f"[{group.rows}, {spell(group.file.mark)}]" for group in row_groups)
    digest = hashlib.sha256(f"[{text}]".encode())  # JSON, as in states of earlier versions
    return int.from_bytes(digest.digest()[:7])  # 56 bits
