"""Row groups of files, and the protocol of sources that read them.

Imports no module that reads files: ranks that are fed rows start without those."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import pyarrow as pa

from farandole.masking import mask

__all__ = ["Far", "File", "Mixed", "Rechecked", "RowGroup", "Source", "fingerprint", "in_flight", "recheck"]


@dataclass(frozen=True, slots=True)
class File:
    """A file as it was when it was listed; `mark` is its time of change, or its store's version."""

    path: str
    size: int
    mark: str

    def __repr__(self) -> str:
        return f"File({mask(self.path)!r}, {self.size}, {self.mark!r})"


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A run of rows that is read as a whole; `number` counts within its file."""

    file: File
    number: int
    rows: int

    def __str__(self) -> str:
        return f"row group {self.number} of {mask(self.file.path)}"


class Source(Protocol):
    """Row groups in a fixed order, and a way to read them from any thread. Can be pickled."""

    @property
    def schema(self) -> pa.Schema:
        """Names and types of all columns."""
        ...

    @property
    def row_groups(self) -> Sequence[RowGroup]:
        """All row groups, in the order of paths and numbers."""
        ...

    def nbytes(self, columns: Sequence[str]) -> int:
        """Estimate how much memory these columns of all row groups take."""
        ...

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Read these columns into memory that is not used again; raises `SourceError` naming the file."""
        ...

    def check(self) -> None:
        """Raise `SourceError` if a file has changed or vanished since it was opened."""
        ...


@runtime_checkable
class Far(Protocol):
    """A source of far files, which is read with many requests at a time."""

    @property
    def in_flight(self) -> int:
        """Row groups to read at a time, as the latency is now; 0 for files of this machine."""
        ...


@runtime_checkable
class Rechecked(Protocol):
    """A source whose `check` leaves the files to be checked by their reading."""

    def recheck(self) -> None:
        """Look at all files; raises as `check` does."""
        ...


@runtime_checkable
class Mixed(Protocol):
    """A source whose rows lie in an order that needs little shuffling."""

    @property
    def least_window(self) -> int:
        """Rows of a lane to shuffle among each other at least."""
        ...


def in_flight(source: Source) -> int:
    """Return how many row groups of `source` to read at a time; 0 if as many as there are workers."""
    return source.in_flight if isinstance(source, Far) else 0


def recheck(source: Source) -> None:
    """Look at all files of `source`, for rows that are not read from there again."""
    if isinstance(source, Rechecked):
        source.recheck()
    else:
        source.check()


def fingerprint(row_groups: Iterable[RowGroup], *, of_table: bool) -> int:
    """Return a number that stands for these row groups in a loader's state: their sizes, not where they lie.

    Those of a table also count with their marks, which stand for columns and deleted rows, and move with the table."""
    told = [[group.rows, group.file.mark] if of_table else group.rows for group in row_groups]
    digest = hashlib.sha256(json.dumps(told).encode())
    return int.from_bytes(digest.digest()[:7])  # 56 bits: exact also for readers of JSON that know doubles only
