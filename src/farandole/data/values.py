"""Rows of one column in memory: a NumPy array, or several arrays for rows of different lengths and sparse vectors."""

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ALIGNMENT",
    "Ragged",
    "SparseRows",
    "Values",
    "empty_aligned",
    "gather_rows",
    "join_values",
    "own_rows",
    "pick_rows",
]

ALIGNMENT = 64  # bytes
_LARGE_ROW = 16 << 10  # bytes from which copying a row takes longer than finding it


@dataclass(frozen=True, slots=True)
class Ragged:
    """Arrays of different lengths: row i is values[offsets[i]:offsets[i + 1]]."""

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice) -> "Ragged":
        """Return consecutive rows without copying their values."""
        first, last, offsets = _cut(rows, self.offsets)
        return Ragged(self.values[first:last], offsets)

    def rows(self) -> list[NDArray[Any]]:
        """Return one array per row, a view of the values."""
        return np.split(self.values, self.offsets[1:-1]) if len(self) else []


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Sparse vectors of one width in CSR form: row i has items offsets[i] to offsets[i + 1] of values and indices."""

    values: NDArray[np.float64]
    indices: NDArray[np.int64]
    offsets: NDArray[np.int64]
    width: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice) -> "SparseRows":
        """Return consecutive rows without copying their values."""
        first, last, offsets = _cut(rows, self.offsets)
        return SparseRows(self.values[first:last], self.indices[first:last], offsets, self.width)

    def dense(self) -> NDArray[np.float64]:
        """Return the vectors as an array (rows, width)."""
        filled = np.zeros((len(self), self.width))
        filled[np.repeat(np.arange(len(self)), np.diff(self.offsets)), self.indices] = self.values
        return filled


# The rows of an array are along its first dimension.
Values: TypeAlias = NDArray[Any] | Ragged | SparseRows


def join_values(parts: list[Values]) -> Values:
    """Concatenate rows of one column; all parts must be of one class."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, np.ndarray):
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        shape = (sum(len(array) for array in arrays), *first.shape[1:])
        return np.concatenate(arrays, out=empty_aligned(shape, np.result_type(*arrays)))
    ragged = [part for part in parts if not isinstance(part, np.ndarray)]
    values = np.concatenate([part.values for part in ragged])
    lengths = np.concatenate([np.diff(part.offsets) for part in ragged])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if isinstance(first, Ragged):
        return Ragged(values, offsets)
    indices = np.concatenate([part.indices for part in ragged if isinstance(part, SparseRows)])
    return SparseRows(values, indices, offsets, first.width)


def own_rows(values: Values) -> Values:
    """Return the values if they can be written to, else a copy that can."""
    if isinstance(values, np.ndarray):
        return values if values.flags.writeable else pick_rows(values, np.arange(len(values)))
    if isinstance(values, Ragged):
        return values if values.values.flags.writeable else Ragged(values.values.copy(), values.offsets)
    return values if values.values.flags.writeable else replace(values, values=values.values.copy())


def gather_rows(parts: list[Values], rows: NDArray[np.int64], scratch: dict[str, NDArray[Any]], name: str) -> Values:
    """Return a copy of these rows, in this order; rows are numbered over all parts, laid end to end.

    Arrays of small rows are concatenated in `scratch[name]`, which is replaced if it is too small or of another type.
    The type of the result holds the values of all parts."""
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if not arrays or len(parts) == 1:
        return pick_rows(join_values(parts), rows)
    kind = np.result_type(*{array.dtype for array in arrays})
    count = sum(len(array) for array in arrays)
    if count == len(arrays) or sum(array.nbytes for array in arrays) >= _LARGE_ROW * count:
        # Large rows, such as images, are copied once, one by one.
        picked = empty_aligned((len(rows), *arrays[0].shape[1:]), kind)
        single = [array[row : row + 1] for array in arrays for row in range(len(array))]
        return np.concatenate([single[row] for row in rows.tolist()], out=picked) if len(rows) else picked
    if name not in scratch or len(scratch[name]) < count or scratch[name].dtype != kind:
        scratch[name] = np.empty((count, *arrays[0].shape[1:]), kind)
    return pick_rows(np.concatenate(arrays, out=scratch[name][:count]), rows)


def pick_rows(values: Values, rows: NDArray[np.int64]) -> Values:
    """Return a copy of these rows, in this order; row numbers must not be negative."""
    if isinstance(values, np.ndarray):
        # Rows are never out of range; the default mode, which checks them, would buffer the output.
        picked = empty_aligned((len(rows), *values.shape[1:]), values.dtype)
        return np.take(values, rows, axis=0, out=picked, mode="clip") if len(rows) else picked
    lengths = np.diff(values.offsets)[rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    items = np.repeat(values.offsets[:-1][rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
    if isinstance(values, Ragged):
        return Ragged(values.values[items], offsets)
    return SparseRows(values.values[items], values.indices[items], offsets, values.width)


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array whose memory TensorFlow and XLA can share, because it begins at a multiple of 64 bytes."""
    if dtype.hasobject:
        return np.empty(shape, dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -room.ctypes.data % ALIGNMENT
    return room[first : first + nbytes].view(dtype).reshape(shape)


def _cut(rows: slice, offsets: NDArray[np.int64]) -> tuple[int, int, NDArray[np.int64]]:
    first, last, step = rows.indices(len(offsets) - 1)
    assert step == 1, "rows of one piece"
    mine = offsets[first : max(first, last) + 1]
    return int(mine[0]), int(mine[-1]), mine - mine[0]
