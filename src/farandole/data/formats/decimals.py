"""Conversion of decimals to the nearest floating-point numbers; Arrow's own is often one unit off."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_EXACT = 2**53  # integers up to here, and powers of ten up to the 22nd, are floating-point numbers themselves
_EXACT_POWER = 22
_WORD = 64  # bits


def nearest_floats(column: pa.Array) -> NDArray[np.float64]:
    """Return decimals of any width, precision and scale, without nulls, as the nearest float64."""
    if not len(column):
        return np.empty(0)
    width, scale, last = column.type.bit_width, column.type.scale, column.offset + len(column)
    each = max(1, width // _WORD)
    words = np.frombuffer(column.buffers()[1], f"<i{min(width, _WORD) // 8}", last * each)
    words = words.reshape(last, each)[column.offset :]
    small = words[:, 0].astype(np.int64)
    one_word = (words[:, 1:] == (small >> (_WORD - 1))[:, None]).all()
    if abs(scale) <= _EXACT_POWER and one_word and ((small >= -_EXACT) & (small <= _EXACT)).all():
        # Both numbers are exact, so the division rounds only once.
        found: NDArray[np.float64] = small / 10.0**scale if scale > 0 else small * 10.0**-scale
        return found
    # Arrow writes all digits, and reads them as the nearest number.
    found = column.cast(pa.string()).cast(pa.float64()).to_numpy()
    return found
