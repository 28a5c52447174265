"""Files, and the row groups in them.

Imports no module that reads files: ranks that get a DataFrame's rows start without those."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import eq
from typing import overload

import numpy as np
from numpy.typing import NDArray

from farandole.masking import mask


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


def rows_in(row_groups: Sequence[RowGroup]) -> NDArray[np.int64]:
    """Return the number of rows of each row group."""
    if isinstance(row_groups, RowGroups):
        return row_groups.rows
    return np.fromiter((group.rows for group in row_groups), np.int64, len(row_groups))


def fingerprint(row_groups: Sequence[RowGroup], *, of_table: bool, choice: str = "") -> int:
    """Return a number that identifies these row groups in a loader's state by their sizes, independent of their paths.

    For a table it also depends on the files' marks, which identify columns and deleted rows and stay the same if the
    table is moved. `choice` identifies the condition that has chosen the rows, if there is one."""
    if not of_table:
        text = ", ".join(map(str, rows_in(row_groups).tolist()))
    else:
        spell = lru_cache(json.dumps)  # row groups of one file follow each other
        text = ", ".join(f"[{group.rows}, {spell(group.file.mark)}]" for group in row_groups)
    digest = hashlib.sha256(f"[{text}]{choice}".encode())  # JSON, as in states of earlier versions
    return int.from_bytes(digest.digest()[:7])  # 56 bits
