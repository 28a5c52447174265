"""Batches of rows, cut from pieces of any length."""

from collections.abc import Iterator, Mapping
from typing import Self

import numpy as np

from farandole.data.loading.meter import Meter
from farandole.data.loading.rounds import Columns, Piece, check_same_columns
from farandole.data.loading.values import LooseRows, Values, ValuesOrLoose, join_values, pick_rows
from farandole.errors import SourceError


class Batch(dict[str, Values]):
    """Rows of one rank in one step: columns by name. Their memory belongs to the batch alone."""

    rows: int  # including repeated ones
    weight = 1.0  # with losses times this, the average over ranks is the mean over all rows of the step
    repeated = 0  # rows at the end that policy "pad" repeats

    @classmethod
    def of(cls, columns: Columns, rows: int, weight: float = 1.0, repeated: int = 0) -> Self:
        """Make a batch with these attributes."""
        batch = cls(columns)
        batch.rows, batch.weight, batch.repeated = rows, weight, repeated
        return batch


def rows_of(columns: Mapping[str, ValuesOrLoose]) -> int:
    """Return the number of rows of these columns."""
    return len(next(iter(columns.values()))) if columns else 0


def joined(piece: Piece) -> Columns:
    """Return the rows with those that are loose copied together."""
    return {name: join_values([values]) for name, values in piece.items()}


class BatchBuffer:
    """Buffer that cuts the columns from `pieces` into batches; `meter` counts the time spent in `pieces` as waiting.

    When the pieces end early, `take` raises `SourceError`; with `open_end` it returns the rows that are left."""

    def __init__(self, pieces: Iterator[Piece], meter: Meter, *, open_end: bool = False) -> None:
        self._pieces, self._meter, self._open_end = pieces, meter, open_end
        self._piece: Piece = {}
        self._items: list[tuple[str, ValuesOrLoose]] = []
        self._at = self._end = 0

    def take(self, rows: int) -> Columns:
        """Return the next `rows` >= 1 rows. They are copied only if they are loose, or from several pieces."""
        last = self._at + rows
        if last <= self._end:
            cut = slice(self._at, last)
            self._at = last
            return {
                name: join_values([values[cut]]) if isinstance(values, LooseRows) else values[cut]
                for name, values in self._items
            }
        parts: list[Piece] = []
        while rows and self._more(rows):
            taken = min(rows, self._end - self._at)
            parts.append({name: values[self._at : self._at + taken] for name, values in self._piece.items()})
            self._at, rows = self._at + taken, rows - taken
        return {name: join_values([part[name] for part in parts], name) for name in (parts[0] if parts else {})}

    def _more(self, missing: int) -> bool:
        """Go to the next piece with rows if the current piece has none left; return False at an open end."""
        while self._at == self._end:
            with self._meter.waiting():
                piece = next(self._pieces, None)
            if piece is None:
                if self._open_end:
                    return False
                raise SourceError("the data", f"ended {missing} rows before a batch that the plan has")
            if self._piece:
                check_same_columns(self._piece, piece)
            self._piece, self._at, self._end = piece, 0, rows_of(piece)
            self._items = list(piece.items())  # iterated over for every batch
        return True


def empty_like(columns: Columns) -> Columns:
    """Return columns of the same types and shapes without rows."""
    return {name: pick_rows(values, np.arange(0)) for name, values in columns.items()}


def fill_up(columns: Columns, source: Columns, rows: int) -> Columns:
    """Append the rows of `source`, repeatedly, until there are `rows` rows; `source` must have a row."""
    missing = np.arange(rows - rows_of(columns)) % rows_of(source)
    if not rows_of(columns):
        return {name: pick_rows(values, missing) for name, values in source.items()}
    return {name: join_values([columns[name], pick_rows(values, missing)]) for name, values in source.items()}
