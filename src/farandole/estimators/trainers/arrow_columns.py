"""Columns of a rank's file that are not plain numbers: values of any type, and vectors that stay sparse."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from farandole.data import ColumnFacts, FieldOptions, Number, Ragged, SparseRows
from farandole.data.formats.fields import Field, Vectors, plan_fields
from farandole.data.loading.values import own_rows
from farandole.errors import DataError

_SPARSE = 0  # a vector's `type`; 1 is dense


def vector_widths(vectors: pa.StructArray) -> list[int]:
    """Return the smallest and the largest width; an empty list if all vectors are null."""
    kinds, sizes, _, values = vectors.flatten()
    held = pc.if_else(pc.equal(kinds, _SPARSE), sizes, pc.list_value_length(values))
    return [width for width in pc.min_max(held).as_py().values() if width is not None]


def filled_up(name: str, vectors: pa.Array, width: int) -> NDArray[np.float64]:
    """Return vectors, none of them null, as an array (rows, width), with zeros where sparse vectors have no number."""
    if not len(vectors):
        return np.empty((0, width))
    field = Vectors(name=name, kind=f"float64[{width}]", width=width, sparse=False)
    values = field.values(pa.chunked_array([vectors]))
    assert isinstance(values, np.ndarray), "sparse=False fills vectors up"
    return values


@dataclass(frozen=True)
class HeldColumn:
    """Numbers in memory, rows first."""

    values: NDArray[Number]

    def take(self, rows: NDArray[np.int64]) -> NDArray[Number]:
        """Copy these rows, in this order."""
        taken: NDArray[Number] = self.values[rows]
        return taken


@dataclass(frozen=True)
class _Chunks:
    """The chunks of an Arrow column, from which single rows are copied."""

    kind: pa.DataType
    chunks: tuple[pa.Array, ...]
    starts: NDArray[np.int64]  # first row of each

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> "_Chunks":
        chunks = tuple(chunk for chunk in column.chunks if len(chunk))
        lengths = [len(chunk) for chunk in chunks]
        return cls(column.type, chunks, np.cumsum([0, *lengths], dtype=np.int64)[:-1])

    def take(self, rows: NDArray[np.int64]) -> pa.Array:
        if not len(rows):
            return pa.array([], self.kind)
        place = np.searchsorted(self.starts, rows, side="right") - 1
        by_chunk = np.argsort(place, kind="stable")
        parts = []
        for number in np.unique(place):
            mine = rows[by_chunk[place[by_chunk] == number]]
            parts.append(self.chunks[number].take(pa.array(mine - self.starts[number])))
        back = np.empty(len(rows), np.int64)
        back[by_chunk] = np.arange(len(rows))
        return pa.concat_arrays(parts).take(pa.array(back))


@dataclass(frozen=True)
class AnyColumn:
    """A column of any type: numbers, texts and bytes, arrays and vectors as NumPy arrays, the rest as Python objects.

    A null is None."""

    name: str
    _rows: _Chunks
    _field: Field | None  # None: Arrow's own conversion to Python objects

    @classmethod
    def of(cls, name: str, column: pa.ChunkedArray) -> "AnyColumn":
        """Plan the conversion from the type and the first row that is not null."""
        # For arrays the type alone decides: their items may be null in the first row, or in others.
        seen = (
            pa.chunked_array([pa.array([[]], column.type)]) if _lists_numbers(column.type) else column.drop_null()[:1]
        )
        table = pa.table({name: seen})
        options = FieldOptions(ragged=[name], dense=[name])
        try:
            (field,) = plan_fields(table.schema, [name], table, options)
        except DataError:  # no tensor holds it, but a function of rows may take it
            field = None
        return cls(name, _Chunks.of(column), field)

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.object_]:
        """Return one object per row."""
        column = self._rows.take(rows)
        cells = np.empty(len(rows), object)
        there = np.flatnonzero(np.asarray(column.is_valid()))
        items = self._items(column.drop_null())
        for place, item in zip(there, items, strict=True):
            cells[place] = item
        return cells

    def _items(self, column: pa.Array) -> Sequence[object]:
        if _lists_numbers(column.type) and column.flatten().null_count:
            return [_with_nulls(cell, column.type.value_type) for cell in column.to_pylist()]
        if self._field is None:
            cells = list(column.to_pylist())
            return [dict(cell) for cell in cells] if pa.types.is_map(column.type) else cells
        values = own_rows(self._field.values(pa.chunked_array([column])))
        if isinstance(values, Ragged):
            return values.rows()
        return list(values.dense() if isinstance(values, SparseRows) else values)


def _lists_numbers(kind: pa.DataType) -> bool:
    """Return whether a column has lists of numbers, of any length."""
    if not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
        return False
    item = kind.value_type
    return bool(pa.types.is_integer(item) or pa.types.is_floating(item) or pa.types.is_boolean(item))


def _with_nulls(items: list[object], kind: pa.DataType) -> NDArray[np.generic]:
    """Return an array; nulls are NaN among floating-point numbers, and None in an array of objects otherwise."""
    if None in items and not pa.types.is_floating(kind):
        return np.array(items, object)
    return np.array([np.nan if item is None else item for item in items], kind.to_pandas_dtype())


@dataclass(frozen=True)
class TextColumn:
    """Strings or bytes as the file has them; the rows of a batch become an array of bytes objects."""

    name: str
    _rows: _Chunks

    @classmethod
    def of(cls, name: str, column: pa.ChunkedArray) -> "TextColumn":
        """Return the column."""
        return cls(name, _Chunks.of(column))

    @staticmethod
    def holds(kind: pa.DataType) -> bool:
        """Return whether a column of this type is one of texts."""
        types = pa.types
        return bool(
            types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
        )

    def facts(self) -> ColumnFacts:
        """Count rows and nulls."""
        return ColumnFacts(
            name=self.name,
            dtype="string",
            rows=sum(len(chunk) for chunk in self._rows.chunks),
            rows_with_nulls=sum(chunk.null_count for chunk in self._rows.chunks),
            listed=False,
            shortest=0,
            longest=0,
        )

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.object_]:
        """Return the texts of these rows, strings in UTF-8."""
        taken = self._rows.take(rows).cast(pa.large_binary())
        texts: NDArray[np.object_] = taken.to_numpy(zero_copy_only=False)
        return texts


@dataclass(frozen=True)
class VectorColumn:
    """pyspark.ml vectors as the file has them; the rows of a batch become an array (rows, width)."""

    name: str
    _rows: _Chunks
    width: int = 0

    @classmethod
    def of(cls, name: str, column: pa.ChunkedArray) -> "VectorColumn":
        """Return the column without its width, which the ranks have yet to agree on."""
        return cls(name, _Chunks.of(column))

    def facts(self) -> ColumnFacts:
        """Count nulls and find the widths, in a pass over the column."""
        nulls, widths = 0, list[int]()
        for chunk in self._rows.chunks:
            widths += vector_widths(chunk)
            nulls += chunk.null_count
        return ColumnFacts(
            name=self.name,
            dtype="float64",
            rows=sum(len(chunk) for chunk in self._rows.chunks),
            rows_with_nulls=nulls,
            listed=True,
            shortest=min(widths, default=0),
            longest=max(widths, default=0),
        )

    def of_width(self, width: int) -> "VectorColumn":
        """Return the column with the width that the ranks have agreed on."""
        return replace(self, width=width)

    def rows_with_nan(self) -> int:
        """Return how many rows hold NaN."""
        found = 0
        for chunk in self._rows.chunks:
            values = chunk.flatten()[3]
            found += len(pc.list_parent_indices(values).filter(pc.is_nan(values.flatten())).unique())
        return found

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return these rows, with zeros where sparse vectors have no number."""
        return filled_up(self.name, self._rows.take(rows), self.width)
