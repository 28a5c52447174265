"""Arrow columns of decoded samples: the first samples decide their types, and all others are converted exactly."""

import functools
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import numpy as np
import pyarrow as pa

from farandole.data.loading.values import LARGE_ROW, Array, LooseRows, ValuesOrLoose, join_values
from farandole.errors import DataError

_PLAIN = {pa.int64(): int, pa.float64(): float, pa.bool_(): bool, pa.string(): str, pa.binary(): bytes}
# Arrow's `to_pandas_dtype` imports pandas, or fails without it.
_NUMBERS = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
_DTYPES = {pa.from_numpy_dtype(code): np.dtype(code) for code in _NUMBERS}


def schema_of(samples: Sequence[Mapping[str, object]], names: Sequence[str]) -> pa.Schema:
    """Return the columns of the first decoded samples, of types that hold their numbers; `names` are for errors.

    A column holds numbers, texts, bytes, or arrays of numbers. Raises `DataError` for other values."""
    for sample, name in zip(samples, names, strict=True):
        if not isinstance(sample, Mapping) or not sample:
            raise DataError("", f"{name}: decode must return a dictionary of columns, not {type(sample).__name__}")
    fields = []
    for column in dict.fromkeys(str(key) for sample in samples for key in sample):
        values = [(sample.get(column), name) for sample, name in zip(samples, names, strict=True)]
        known = [each for each in values if each[0] is not None] or values[:1]
        kinds = [_type_of(column, value, name) for value, name in known]
        fields.append(pa.field(column, functools.reduce(_wider, kinds)))
    return pa.schema(fields)


def first_values(samples: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the first value of each column that is not null."""
    found: dict[str, object] = {}
    for sample in samples:
        found = {key: value for key, value in sample.items() if value is not None} | found
    return found


def columns_of(samples: Sequence[Mapping[str, object]], names: Sequence[str], schema: pa.Schema) -> pa.Table:
    """Make a table of decoded samples, which have the columns of `schema`.

    Raises `DataError` naming column and sample for a value that the column's type does not hold exactly."""
    arrays = [column_of([sample[field.name] for sample in samples], names, field) for field in schema]
    return pa.table(arrays, schema=schema)


def check_columns(sample: Mapping[str, object], name: str, schema: pa.Schema, columns: Collection[str]) -> None:
    """Raise `DataError` if a sample lacks one of `columns`, or if these are all, and it has others."""
    for column in columns:
        if column not in sample:
            raise DataError(column, f"{name} has no such column, but the first samples have; let decode return it, too")
    if len(columns) == len(schema) < len(sample):
        more = next(str(column) for column in sample if column not in schema.names)
        advice = "let decode return the same columns of each sample"
        raise DataError(more, f"{name} has this column, but the first samples have not; {advice}")


def _type_of(column: str, value: object, name: str) -> pa.DataType:
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
    if isinstance(value, bool | int | float | str | bytes | np.generic):
        try:
            return pa.scalar(value).type
        except (pa.ArrowException, TypeError, OverflowError, UnicodeError) as error:
            raise DataError(column, f"{name}: no column holds {value!r:.60}: {error}") from error
    raise DataError(column, f"{name}: no column holds {type(value).__name__}; decode must return numbers or arrays")


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the type of numbers of both types; `one` if there is none, so that values of the other are refused."""
    if one == other or one not in _DTYPES or other not in _DTYPES or pa.bool_() in (one, other):
        return one
    return pa.from_numpy_dtype(np.result_type(_DTYPES[one], _DTYPES[other]))


def column_of(values: Sequence[object], names: Sequence[str], field: pa.Field) -> pa.Array:
    """Make one column of the samples' values; raises as `columns_of` does."""
    if not pa.types.is_nested(field.type):
        return _scalars(values, names, field)
    shape, _ = _shape_of(field.type)
    flats = [array.reshape(-1) for array in _arrays_like(values, names, field)]
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

    def add(self, value: object, name: str) -> None:
        """Add the array of sample `name`; raises as `columns_of` does."""
        (array,) = _arrays_like([value], [name], self._field)
        self._loose.single.append((array if _is_immutable(array) else array.copy())[np.newaxis])

    def rows(self) -> ValuesOrLoose:
        """Return the rows, of which there must be one at least; small ones as one array."""
        return self._loose if self._loose.single[0].nbytes >= LARGE_ROW else join_values([self._loose])


def _is_immutable(array: Array) -> bool:
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, bytes)


def numbers_of(values: Sequence[object], kind: pa.DataType) -> Array | None:
    """Return Python's numbers as an array; None for other types and too large numbers, which Arrow must convert."""
    if kind not in _DTYPES or not _are_plain(values, kind):
        return None
    try:
        return np.array(values, _DTYPES[kind])
    except OverflowError:
        return None


def _arrays_like(values: Sequence[object], names: Sequence[str], field: pa.Field) -> list[Array]:
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


def _scalars(values: Sequence[object], names: Sequence[str], field: pa.Field) -> pa.Array:
    kind = field.type
    if _are_plain(values, kind):
        with suppress(pa.ArrowException, OverflowError, UnicodeError):  # raised below, naming the sample
            return pa.array(values, kind)
    for value, name in zip(values, names, strict=True):
        if value is not None and not _holds(kind, value):
            found = f"{name} has {value!r:.60} of type {type(value).__name__}"
            problem = f"{found}, which {kind}, the type of the first samples, does not hold exactly"
            raise DataError(field.name, f"{problem}; make them alike in decode: float(...), int(...) or str(...)")
    return pa.array(values, kind)


def _are_plain(values: Sequence[object], kind: pa.DataType) -> bool:
    """Return whether all values are of the Python type that is the same as `kind`."""
    plain = _PLAIN.get(kind)
    return plain is not None and all(type(value) is plain for value in values)


def _holds(kind: pa.DataType, value: object) -> bool:
    """Return whether a column of `kind` holds a value without loss."""
    plain = value.item() if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 else value
    # Arrow would make integers of floating-point numbers, and numbers of booleans.
    allowed = (
        (int, float) if pa.types.is_floating(kind) else int if pa.types.is_integer(kind) else _PLAIN.get(kind, object)
    )
    if not isinstance(plain, allowed) or isinstance(plain, bool) != pa.types.is_boolean(kind):
        return False
    try:
        return bool(plain != plain or pa.scalar(value, kind).as_py() == plain)
    except (pa.ArrowException, OverflowError, UnicodeError):
        return False
