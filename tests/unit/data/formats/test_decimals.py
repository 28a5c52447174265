"""Decimals as the nearest floating-point numbers."""

import random
from decimal import Decimal

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa

from farandole.data.formats.decimals import nearest_floats

KINDS = [
    pa.decimal128(12, 3),
    pa.decimal128(15, 0),
    pa.decimal128(38, 18),
    pa.decimal128(38, 38),
    pa.decimal128(20, -5),
    pa.decimal256(40, 5),
    pa.decimal256(76, 22),
    pa.decimal256(76, 76),
    *([pa.decimal32(9, 4), pa.decimal64(18, 6)] if hasattr(pa, "decimal32") else []),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("small", [True, False])
def test_every_decimal_becomes_the_nearest_float(kind: pa.DataType, small: bool) -> None:
    draw = random.Random(str(kind))
    most = 10 ** min(kind.precision, 12 if small else 76)
    numbers = [draw.randrange(1 - most, most) // 10 ** draw.randrange(4) for _ in range(500)]
    numbers += [0, 1, -1, most - 1, 1 - most]
    numbers += [edge for edge in (2**53, 2**53 + 1, -(2**53) - 1, 2**63, -(2**63), 2**64 + 1) if abs(edge) < most]
    # A slice begins at an offset, and has a buffer that is longer than itself.
    raw = b"".join(number.to_bytes(kind.bit_width // 8, "little", signed=True) for number in [0, *numbers, 1])
    column = pa.Array.from_buffers(kind, len(numbers) + 2, [None, pa.py_buffer(raw)])[1:-1]
    values = [Decimal(f"{number}e{-kind.scale}") for number in numbers]
    assert column.to_pylist()[:9] == values[:9]
    assert nearest_floats(column).tolist() == [float(value) for value in values]
    assert nearest_floats(column[:0]).dtype == np.float64
