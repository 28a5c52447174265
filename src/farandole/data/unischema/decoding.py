"""Decoding of the stored columns of a Petastorm data set, and of the values that a predicate sees."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal

import numpy as np

from farandole.data.formats.selection import Predicate
from farandole.data.loading.rounds import Columns
from farandole.data.loading.values import Array, Ragged, Values
from farandole.data.unischema.codecs import BytesCodec
from farandole.data.unischema.field import UnischemaField, fitting
from farandole.data.unischema.schema import Unischema
from farandole.errors import DataError, FarandoleError


class Decoding:
    """A transform of stored columns to those of the schema, which then calls the user's transform `then`.

    `nullable` are the fields whose nulls are left, as None."""

    def __init__(self, schema: Unischema, then: Callable[[Columns], Columns] | None) -> None:
        self._fields, self._then = schema.fields, then
        self.nullable = frozenset(field.name for field in schema if field.nullable)

    def __call__(self, columns: Columns) -> Columns:
        made = {
            name: _decoded(self._fields[name], values) if name in self._fields else values
            for name, values in columns.items()
        }
        return made if self._then is None else self._then(made)


class DecodedPredicate:
    """The predicate `asked` on values that have been decoded."""

    def __init__(self, schema: Unischema, asked: Predicate) -> None:
        self._fields, self._asked = schema.fields, asked

    def get_fields(self) -> Iterable[str]:
        """Return the fields that the predicate asks for."""
        return self._asked.get_fields()

    def do_include(self, values: Mapping[str, object]) -> bool:
        """Return whether the row with these stored values is chosen."""
        return self._asked.do_include({name: self._value(name, value) for name, value in values.items()})

    def _value(self, name: str, value: object) -> object:
        field = self._fields.get(name)
        if value is None or field is None or not isinstance(value, bytes) or not isinstance(field.codec, BytesCodec):
            return value
        return _array(field, field.codec, value)


def decodes_bytes(schema: Unischema) -> bool:
    """Return whether some fields are arrays in bytes, which take more memory than what is stored."""
    return any(isinstance(field.codec, BytesCodec) for field in schema)


def _decoded(field: UnischemaField, values: Values) -> Values:
    if isinstance(field.codec, BytesCodec):
        cells = np.asarray(values, object).tolist()
        codec = field.codec
        return _column(field, [None if cell is None else _array(field, codec, cell) for cell in cells])
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf" or field.shape:
        return values
    return _cast(field, values)


def _array(field: UnischemaField, codec: BytesCodec, stored: bytes) -> Array:
    try:
        return fitting(field, codec.decode(field, stored))
    except FarandoleError:
        raise
    except Exception as error:  # NumPy has errors of many classes for damaged bytes
        raise DataError(field.name, f"cannot be decoded by {type(codec).__name__}: {error}") from error


def _column(field: UnischemaField, arrays: Sequence[Array | None]) -> Values:
    """Return arrays as a column whose kind depends on the schema alone, so that all parts of a column fit together."""
    whole = [array for array in arrays if array is not None]
    if None not in field.shape[1:] and len(whole) == len(arrays):
        dtype = np.dtype(field.numpy_dtype)
        if field.shape[:1] != (None,):
            lengths = [length for length in field.shape if length is not None]
            return np.stack(whole) if whole else np.empty((0, *lengths), dtype)
        nothing = np.empty((0, *(length for length in field.shape[1:] if length is not None)), dtype)
        return Ragged(np.concatenate([nothing, *whole]), np.cumsum([0, *map(len, whole)]))
    cells = np.empty(len(arrays), object)
    for place, array in enumerate(arrays):
        cells[place] = array
    return cells


def _cast(field: UnischemaField, values: Array) -> Array:
    """Return numbers in the field's type; with nulls, which reading gives integers as NaN, as objects."""
    if field.numpy_dtype is Decimal:
        return values
    dtype = np.dtype(field.numpy_dtype)
    if dtype.kind not in "biuf" or dtype == values.dtype:
        return values
    missing = np.isnan(values) if dtype.kind in "biu" and values.dtype.kind == "f" else np.zeros(len(values), bool)
    if missing.any():
        cells = values.astype(object)
        cells[missing] = None
        cells[~missing] = _cast(field, values[~missing])
        return cells
    made: Array = values.astype(dtype)
    if dtype.kind != "f" and not np.array_equal(made, values):
        lost = values[made != values][0]
        raise DataError(field.name, f"has {lost}, which {dtype}, its type in the schema, cannot hold")
    return made
