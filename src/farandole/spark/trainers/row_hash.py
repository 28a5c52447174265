"""Hash of each row's content, by which a rank puts the rows of files in an order of their own."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

__all__ = ["hash_rows"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0x5851F42D4C957F2D)


def hash_rows(columns: Sequence[pa.Array]) -> NDArray[np.int64]:
    """Return a hash of each row over all columns; rows of equal values have equal hashes, on every machine."""
    total = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        total = _mixed(total + _GOLDEN) ^ _hashed(column)
    return _mixed(total).view(np.int64)


def _hashed(column: pa.Array) -> NDArray[np.uint64]:
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        found = _of_lists(column)
    elif pa.types.is_integer(kind):
        found = _mixed(np.asarray(column.fill_null(0)).astype(np.int64).view(np.uint64))
    elif pa.types.is_floating(kind):
        # Adding 0.0 makes -0.0 equal to 0.0.
        found = _mixed((np.asarray(column.fill_null(0.0)).astype(np.float64) + 0.0).view(np.uint64))
    elif pa.types.is_struct(kind):
        found = hash_rows(column.flatten()).view(np.uint64)
    else:
        cells = np.array([repr(cell) for cell in column.to_pylist()], object)
        found = pd.util.hash_array(cells, categorize=False)
    if column.null_count:
        found = np.where(np.asarray(column.is_null()), _NULL, found)
    return found


def _of_lists(column: pa.Array) -> NDArray[np.uint64]:
    """Add up the hashes of a list's items, each mixed with its place in the list."""
    lengths = np.diff(np.asarray(column.offsets)).astype(np.int64)
    ends = np.cumsum(lengths)
    starts = np.concatenate([[0], ends])
    items = _hashed(column.values.slice(column.offsets[0].as_py(), int(starts[-1])))
    place = (np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)).astype(np.uint64)
    # Wraps around, and so do the differences.
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(items + place * _GOLDEN), dtype=np.uint64)])
    return _mixed(sums[starts[1:]] - sums[starts[:-1]] + lengths.astype(np.uint64))


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return bits of which each depends on all given ones: the finalizer of SplitMix64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
