"""Rows of one column in memory: a NumPy array, or several arrays for rows of different lengths and sparse vectors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from farandole._native import copy_rows
from farandole.errors import DataError

Array: TypeAlias = NDArray[Any]  # of items of any type

ALIGNMENT = 64  # bytes
_EXACT = 2**53  # float64 holds every integer up to here
LARGE_ROW = 16 << 10  # bytes from which copying a row takes longer than finding it
_VIEWED_ROW = 8 << 10  # bytes from which copying a row twice takes longer than making an array of it


@dataclass(frozen=True, slots=True)
class Ragged:
    """Arrays of different lengths: row i is values[offsets[i]:offsets[i + 1]]."""

    values: Array
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice) -> "Ragged":
        """Return consecutive rows without copying their values."""
        first, last, offsets = _cut(rows, self.offsets)
        return Ragged(self.values[first:last], offsets)

    def rows(self) -> list[Array]:
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
Values: TypeAlias = Array | Ragged | SparseRows


@dataclass(frozen=True, slots=True)
class LooseRows:
    """Large rows of one shape and type, such as images, each an array of one row in memory of any owner.

    They are copied once: by `join_values`, into a batch."""

    single: list[Array]

    def __len__(self) -> int:
        return len(self.single)

    def __getitem__(self, rows: slice) -> "LooseRows":
        """Return consecutive rows without copying them."""
        return LooseRows(self.single[rows])


ValuesOrLoose: TypeAlias = Values | LooseRows


def join_values(parts: Sequence[ValuesOrLoose], name: str = "") -> Values:
    """Concatenate rows of column `name`. Arrays become ragged if they differ in length, or if other parts are ragged.

    Raises `DataError` for parts that no class holds together."""
    if len(parts) == 1 and not isinstance(parts[0], LooseRows):
        return parts[0]
    parts = parts if _are_alike(parts) else _of_one_class(parts, name)
    first = parts[0]
    if isinstance(first, np.ndarray | LooseRows):
        arrays = [array for part in parts for array in _arrays_of(part)]
        shape = (sum(len(array) for array in arrays), *arrays[0].shape[1:])
        made = empty_aligned(shape, np.result_type(*{array.dtype for array in arrays}))
        if not isinstance(first, LooseRows) or any(array.dtype != made.dtype for array in arrays):
            return np.concatenate(arrays, out=made)
        copy_rows(made, [np.ascontiguousarray(array) for array in arrays])
        return made
    ragged = [part for part in parts if isinstance(part, Ragged | SparseRows)]
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


def gather_rows(
    parts: Sequence[ValuesOrLoose], rows: NDArray[np.int64], scratch: dict[str, Array], name: str
) -> ValuesOrLoose:
    """Return these rows, in this order: a copy, or large ones loose. Rows are numbered over all parts, laid end to end.

    Arrays of small rows are concatenated in `scratch[name]`, which is replaced if it is too small or of another type.
    The type of the result holds the values of all parts."""
    arrays = [array for part in parts for array in _arrays_of(part)]
    kinds = {array.dtype for array in arrays}
    # A transform may get or make nulls as objects in some parts, or arrays of other lengths.
    if {np.dtype(object)} < kinds or not _are_alike(parts):
        return gather_rows(_of_one_class(parts, name), rows, scratch, name)
    if not arrays:
        return pick_rows(join_values(parts, name), rows)
    count = sum(len(array) for array in arrays)
    if sum(array.nbytes for array in arrays) >= LARGE_ROW * max(1, count):
        single = [array[row : row + 1] for array in arrays for row in range(len(array))]
        loose = LooseRows([single[row] for row in rows.tolist()])
        return loose if len(kinds) == 1 else join_values([loose])
    kind = np.result_type(*kinds)
    if kind == np.float64 and len(kinds) > 1:
        check_exact(name, *arrays)
    if len(arrays) == 1:
        return pick_rows(arrays[0], rows)
    if count == len(arrays):
        picked = empty_aligned((len(rows), *arrays[0].shape[1:]), kind)
        return np.concatenate([arrays[row] for row in rows.tolist()], out=picked) if len(rows) else picked
    if name not in scratch or len(scratch[name]) < count or scratch[name].dtype != kind:
        scratch[name] = np.empty((count, *arrays[0].shape[1:]), kind)
    return pick_rows(np.concatenate(arrays, out=scratch[name][:count]), rows)


def cells_of(values: Values) -> Array:
    """Return an array of objects: of each row, its array or its number."""
    rows = values.rows() if isinstance(values, Ragged) else values.dense() if isinstance(values, SparseRows) else values
    cells = np.empty(len(values), object)
    for place, row in enumerate(rows):
        cells[place] = row
    return cells


def check_exact(name: str, *arrays: Array) -> None:
    """Raise `DataError` for integers of column `name` that float64 does not hold."""
    for array in arrays:
        if array.dtype.kind in "iu" and array.size and not -_EXACT <= array.min() <= array.max() <= _EXACT:
            problem = "has nulls beside integers beyond 2**53, which float64 does not hold; say what stands for them"
            raise DataError(name, f"{problem}: nulls={{'{name}': ...}}")


def _are_alike(parts: Sequence[ValuesOrLoose]) -> bool:
    """Return whether the parts are all ragged, all sparse, or arrays whose rows have one shape."""
    arrays = [array for part in parts for array in _arrays_of(part)]
    others = {type(part) for part in parts if isinstance(part, Ragged | SparseRows)}
    return len({array.shape[1:] for array in arrays}) + len(others) <= 1


def _of_one_class(parts: Sequence[ValuesOrLoose], name: str) -> Sequence[Values]:
    """Return parts of one class: arrays of objects if one of them is, as nulls are objects, else ragged arrays."""
    whole = [join_values([part], name) for part in parts]
    if any(isinstance(part, np.ndarray) and part.dtype.hasobject for part in whole):
        return [cells_of(part) for part in whole]
    arrays = [part.dense() if isinstance(part, SparseRows) else part for part in whole]
    ragged = [_as_ragged(part) if isinstance(part, np.ndarray) and part.ndim > 1 else part for part in arrays]
    shapes = {part.values.shape[1:] if isinstance(part, Ragged) else None for part in ragged}
    if None in shapes or len(shapes) > 1:
        found = " and ".join(sorted(str(np.shape(cells_of(part)[0])) for part in arrays if len(part)))
        raise DataError(name, f"has rows of shapes {found}, which no batch holds together; give them one shape")
    return ragged


def _as_ragged(array: Array) -> Ragged:
    return Ragged(array.reshape(-1, *array.shape[2:]), np.arange(len(array) + 1) * array.shape[1])


def cut_down(parts: Sequence[ValuesOrLoose], rows: NDArray[np.int64]) -> Sequence[ValuesOrLoose]:
    """Return the parts without all but these rows, which are numbered as for `gather_rows` and ascend."""
    ends = np.cumsum([len(part) for part in parts])
    cuts = np.searchsorted(rows, ends)
    made, first, start = [], 0, 0
    for part, last, end in zip(parts, cuts.tolist(), ends.tolist(), strict=True):
        if first < last:
            made.append(_picked(part, rows[first:last] - start))
        first, start = last, end
    return made


def _picked(part: ValuesOrLoose, rows: NDArray[np.int64]) -> ValuesOrLoose:
    if isinstance(part, np.ndarray) and part.nbytes >= _VIEWED_ROW * len(part):
        return LooseRows([part[row : row + 1] for row in rows.tolist()])
    return (
        LooseRows([part.single[row] for row in rows.tolist()]) if isinstance(part, LooseRows) else pick_rows(part, rows)
    )


def _arrays_of(part: ValuesOrLoose) -> Sequence[Array]:
    if isinstance(part, LooseRows):
        return part.single
    return [part] if isinstance(part, np.ndarray) else []


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


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
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
