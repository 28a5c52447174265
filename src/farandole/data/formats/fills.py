"""Values that replace nulls, checked against a column's type."""

from decimal import Decimal

import numpy as np
import pyarrow as pa

from farandole.data.formats.schemas import is_list
from farandole.errors import ConfigError


def checked_fill(name: str, kind: pa.DataType, fill: object) -> object:
    """Return what stands for nulls; raises `ConfigError` if the column's type cannot hold it.

    A time of NumPy becomes an integer in the column's unit: Arrow takes such times of that very unit at most."""
    given = fill
    if isinstance(fill, float) and pa.types.is_decimal(kind):
        fill = Decimal(repr(fill))
    try:
        if isinstance(fill, np.datetime64 | np.timedelta64):
            fill = _in_unit(kind, fill)
        held = pa.scalar(fill, kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind)
        if not _same_fill(kind, fill, held):
            raise ValueError(f"it would become {held}")
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ConfigError("nulls", f"'{name}' is {kind}, which cannot hold {given!r} ({error})") from error
    return fill


def _in_unit(kind: pa.DataType, fill: np.datetime64 | np.timedelta64) -> int:
    """Return a time as an integer in the unit of `kind`; raises `ValueError` for one of another kind or finer."""
    if pa.types.is_date(kind):
        unit = "M8[D]" if pa.types.is_date32(kind) else "M8[ms]"
    elif pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        unit = f"{'M8' if pa.types.is_timestamp(kind) else 'm8'}[{kind.unit}]"
    else:
        raise ValueError("it is a time")
    made = fill.astype(unit) if np.dtype(unit).kind == fill.dtype.kind else fill
    # Compared in the unit of `fill`: NumPy wraps times that the finer unit cannot hold.
    if made.dtype != unit or made.astype(fill.dtype) != fill:
        raise ValueError(f"its values are {np.dtype(unit)}")
    return int(made.astype(np.int64))


def _same_fill(kind: pa.DataType, fill: object, held: pa.Scalar) -> bool:
    """Return whether `held` is `fill`; Arrow cuts off fractions of numbers and times, and makes large floats infinite.

    Floating-point numbers may be rounded."""
    if pa.types.is_temporal(kind) and not isinstance(fill, int):
        given = pa.scalar(fill)
        return bool(held.cast(given.type) == given)
    while is_list(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind):
        return np.array_equal(held.as_py(), np.asarray(fill))
    if pa.types.is_floating(kind):
        return np.array_equal(np.isinf(held.as_py()), np.isinf(np.asarray(fill, np.float64)))
    return True
