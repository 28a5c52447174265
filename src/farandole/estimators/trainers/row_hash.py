"""Hash of each row's content, by which rows are shared out and ordered; Spark's `xxhash64` for rows of numbers."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from farandole.data import Number

U = TypeVar("U", np.uint32, np.uint64)

_SEED = 42
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(each)
    for each in (
        *(0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
        *(0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5),
    )
)


def hash_rows(columns: Sequence[pa.Array]) -> NDArray[np.int64]:
    """Return a hash of each row over all columns; rows of equal values have equal hashes, on every machine.

    Where all columns are numbers, booleans, or arrays and structs of these, it is Spark's `xxhash64(*columns)`."""
    total = np.full(len(columns[0]), _SEED, np.uint64)
    for column in columns:
        total = _hash_column(column, total)
    return total.view(np.int64)


def partition_of(hashes: NDArray[np.int64], partitions: int) -> NDArray[np.int64]:
    """Return the partition of each row in Spark's `repartition(partitions, hash)`: Murmur3 of the hash, modulo."""
    state = np.full(len(hashes), _SEED, np.uint32)
    for half in (hashes, hashes >> 32):
        word = (half & 0xFFFFFFFF).astype(np.uint32) * np.uint32(0xCC9E2D51)
        state ^= _rotated(word, 15) * np.uint32(0x1B873593)
        state = _rotated(state, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    state ^= np.uint32(8)  # bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> np.uint32(shift))) * np.uint32(factor)
    state ^= state >> np.uint32(16)
    return state.view(np.int32).astype(np.int64) % partitions


def _hash_column(column: pa.Array, seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the hash of each row, given the hash `seeds` of its columns before; a null leaves the hash unchanged."""
    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        column = column.cast(pa.list_(kind.value_type))
        kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _hash_lists(column, seeds)
    if pa.types.is_struct(kind):
        found = seeds
        for field in column.flatten():
            found = _hash_column(field, found)
    elif _is_number(kind):
        found = _hash_numbers(_numbers(column), seeds)
    else:
        cells = np.array([repr(cell) for cell in column.to_pylist()], object)
        found = _hash_numbers(pd.util.hash_array(cells, categorize=False).view(np.int64), seeds)
    return np.where(np.asarray(column.is_null()), seeds, found) if column.null_count else found


def _hash_lists(column: pa.Array, seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash the lists item by item: the first items of all rows, then the second ones; a null list has no items."""
    lengths = np.where(np.asarray(column.is_null()), 0, np.diff(np.asarray(column.offsets)))
    starts = np.asarray(column.offsets)[:-1].astype(np.int64)
    values, valid = column.values, None
    plain = _numbers(values) if _is_number(values.type) else None
    if plain is not None and values.null_count:
        valid = np.asarray(values.is_valid())
    found = seeds.copy()
    for place in range(int(lengths.max(initial=0))):
        rows = np.flatnonzero(lengths > place)
        items = starts[rows] + place
        if plain is None:
            found[rows] = _hash_column(values.take(pa.array(items)), found[rows])
            continue
        hashed = _hash_numbers(plain[items], found[rows])
        found[rows] = hashed if valid is None else np.where(valid[items], hashed, found[rows])
    return found


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _numbers(column: pa.Array) -> NDArray[Number]:
    """Return the numbers of a column in the type that Spark hashes them in; nulls are 0."""
    kind = column.type
    if pa.types.is_boolean(kind) or kind in (pa.uint8(), pa.int8(), pa.int16(), pa.uint16()):
        column = column.cast(pa.int32())
    elif pa.types.is_unsigned_integer(kind):
        return np.asarray(column.fill_null(0)).astype(np.int64)
    elif pa.types.is_float16(kind):
        column = column.cast(pa.float32())
    return np.asarray(column.fill_null(0))


def _hash_numbers(numbers: NDArray[Number], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    if numbers.dtype.kind == "f":
        numbers = numbers + numbers.dtype.type(0)  # -0.0 becomes 0.0
        numbers[np.isnan(numbers)] = np.nan  # all NaNs get the same bits
    if numbers.dtype.itemsize == 4:
        bits = np.ascontiguousarray(numbers).view(np.uint32).astype(np.uint64)
        found = (seeds + _P5 + np.uint64(4)) ^ (bits * _P1)
        found = _rotated(found, 23) * _P2 + _P3
    else:
        bits = np.ascontiguousarray(numbers).view(np.uint64)
        found = (seeds + _P5 + np.uint64(8)) ^ (_rotated(bits * _P2, 31) * _P1)
        found = _rotated(found, 27) * _P1 + _P4
    found = (found ^ (found >> np.uint64(33))) * _P2
    found = (found ^ (found >> np.uint64(29))) * _P3
    hashed: NDArray[np.uint64] = found ^ (found >> np.uint64(32))
    return hashed


def _rotated(words: NDArray[U], bits: int) -> NDArray[U]:
    """Return unsigned integers with their bits rotated to the left."""
    kind = words.dtype.type
    size = words.dtype.itemsize * 8
    rotated: NDArray[U] = (words << kind(bits)) | (words >> kind(size - bits))
    return rotated
