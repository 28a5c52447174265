"""Arrow columns of decoded samples: the first sample decides their types, and all others must have the same."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from farandole.data.values import LARGE_ROW, LooseRows, ValuesOrLoose, join_values
from farandole.errors import DataError

__all__ = ["Stack", "check_columns", "column_of", "columns_of", "numbers_of", "schema_of"]

_PLAIN = {pa.int64(): int, pa.float64(): float, pa.bool_(): bool}
# Arrow's `to_pandas_dtype` imports pandas, or fails without it.
_NUMBERS = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
_DTYPES = {pa.from_numpy_dtype(code): np.dtype(code) for code in _NUMBERS}


def schema_of(sample: Mapping[str, Any], name: str) -> pa.Schema:
    """Return the columns of a decoded sample; `name` is the sample's name, for errors.

    A column holds numbers, texts, bytes, or arrays of numbers. Raises `DataError` for other values."""
    if not isinstance(sample, Mapping) or not sample:
        raise DataError("", f"{name}: decode must return a dictionary of columns, not {type(sample).__name__}")
    return pa.schema([pa.field(str(column), _type_of(str(column), value, name)) for column, value in sample.items()])


def columns_of(samples: Sequence[Mapping[str, Any]], names: Sequence[str], schema: pa.Schema) -> pa.Table:
    """Make a table of decoded samples; raises `DataError` naming column and sample if one does not fit the schema."""
    check_columns(samples, names, schema)
    arrays = [column_of([sample[field.name] for sample in samples], names, field) for field in schema]
    return pa.table(arrays, schema=schema)


def check_columns(samples: Sequence[Mapping[str, Any]], names: Sequence[str], schema: pa.Schema) -> None:
    """Raise `DataError` for a sample that lacks a column."""
    for sample, name in zip(samples, names, strict=True):
        missing = [field.name for field in schema if field.name not in sample]
        if missing:
            raise DataError(missing[0], f"{name} has no such column, but the first sample has")


def _type_of(column: str, value: Any, name: str) -> pa.DataType:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise DataError(
                column, f"{name}: no column holds arrays of {value.dtype}; decode must make numbers of them"
            )
        kind = pa.from_numpy_dtype(value.dtype)
        if value.ndim == 1:
            return pa.list_(kind)  # of any length: `ragged=` allows different ones
        for length in reversed(value.shape):
            kind = pa.list_(kind, length)
        return kind
    kind = pa.scalar(value).type if isinstance(value, bool | int | float | str | bytes | np.generic) else None
    if kind is None:
        raise DataError(column, f"{name}: no column holds {type(value).__name__}; decode must return numbers or arrays")
    return kind


def column_of(values: Sequence[Any], names: Sequence[str], field: pa.Field) -> pa.Array:
    """Make one column of the samples' values; raises as `columns_of` does."""
    if not pa.types.is_nested(field.type):
        try:
            return pa.array(values, field.type)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise _unlike(field, values, names, error) from error
    shape, _ = _shape_of(field.type)
    flats = [array.reshape(-1) for array in _alike(values, names, field)]
    flat = flats[0] if len(flats) == 1 else np.concatenate(flats)
    if shape is None:
        ends = np.cumsum([0, *map(len, flats)], dtype=np.int32)
        return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat))
    made = pa.array(flat)
    for length in reversed(shape):
        made = pa.FixedSizeListArray.from_arrays(made, length)
    return made


class Stack:
    """Rows of one column of arrays of one shape.

    They are kept as they are if their memory cannot change, as that of Pillow's images. Others are copied when they are
    added, while they are in the processor's cache, because a user's function may use its memory again."""

    def __init__(self, field: pa.Field) -> None:
        self._field = field
        self._loose = LooseRows([])

    def add(self, value: Any, name: str) -> None:
        """Add the array of sample `name`; raises as `columns_of` does."""
        (array,) = _alike([value], [name], self._field)
        self._loose.single.append((array if _is_immutable(array) else array.copy())[np.newaxis])

    def rows(self) -> ValuesOrLoose:
        """Return the rows, of which there must be one at least; small ones as one array."""
        return self._loose if self._loose.single[0].nbytes >= LARGE_ROW else join_values([self._loose])


def _is_immutable(array: NDArray[Any]) -> bool:
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, bytes)


def numbers_of(values: Sequence[Any], kind: pa.DataType) -> NDArray[Any] | None:
    """Return Python's numbers as an array; None for other types and too large numbers, which Arrow must convert."""
    plain = _PLAIN.get(kind)
    if plain is None or any(type(value) is not plain for value in values):
        return None
    try:
        return np.array(values, _DTYPES[kind])
    except OverflowError:
        return None


def _alike(values: Sequence[Any], names: Sequence[str], field: pa.Field) -> list[NDArray[Any]]:
    shape, kind = _shape_of(field.type)
    arrays = [np.asarray(value) for value in values]
    for array, name in zip(arrays, names, strict=True):
        same = array.ndim == 1 if shape is None else array.shape == shape
        if not same or array.dtype != _DTYPES.get(kind):
            wanted = f"{kind}{list(shape) if shape else ' of one dimension'}"
            found = f"{array.dtype}{list(array.shape)}"
            raise DataError(
                field.name, f"{name} has {found}, and the first sample has {wanted}; make them alike in decode"
            )
    return arrays


@functools.cache
def _shape_of(kind: pa.DataType) -> tuple[tuple[int, ...] | None, pa.DataType]:
    """Return the shape of arrays, None for one dimension of any length, and the type of their items."""
    if pa.types.is_list(kind):
        return None, kind.value_type
    shape = []
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    return tuple(shape), kind


def _unlike(field: pa.Field, values: Sequence[Any], names: Sequence[str], error: Exception) -> DataError:
    for value, name in zip(values, names, strict=True):
        try:
            pa.array([value], field.type)
        except (pa.ArrowException, TypeError, OverflowError):
            return DataError(field.name, f"{name} has {type(value).__name__}, and the first sample has {field.type}")
    return DataError(field.name, f"{names[0]}: {error}")
