"""Petastorm's `TransformSpec`: a transform of rows by a function of a pandas frame, or of one row."""

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike

from farandole.data.formats.fields import FieldOptions, plan_fields
from farandole.data.loading.rounds import Columns
from farandole.data.loading.values import Array, Ragged, SparseRows, Values
from farandole.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TransformSpec", "edit_field", "transform_schema"]

T = TypeVar("T")

# NumPy would make arrays of objects of them.
_STORED = (datetime.date, datetime.timedelta, Decimal)


def edit_field(
    name: str, numpy_dtype: DTypeLike, shape: tuple[int | None, ...], nullable: bool = False
) -> tuple[str, DTypeLike, tuple[int | None, ...], bool]:
    """Return an item of `edit_fields`; None in `shape` stands for any length."""
    return name, numpy_dtype, shape, nullable


class TransformSpec:
    """Transform of rows after they were read, on the thread that reads.

    With `make_batch_reader`, `func` takes and returns a pandas frame; with `make_reader`, a dictionary with one row. It
    must not change the number of rows. `edit_fields` lists columns that `func` changes or adds, as (name, type, shape,
    nullable); other columns have the types that `func` returns: a frame's dtypes, and for dates, times and decimals in
    cells those of columns that are read. Dates are datetime64[s] in the frame, and dates again afterwards. Columns in
    `removed_fields`, or not in `selected_fields`, are left out.
    """

    def __init__(
        self,
        func: Callable[[Any], Any] | None = None,
        edit_fields: Sequence[Any] | None = None,
        removed_fields: Sequence[str] | None = None,
        selected_fields: Sequence[str] | None = None,
    ) -> None:
        if removed_fields and selected_fields:
            raise ValueError("give removed_fields or selected_fields, not both")
        self.func, self.removed_fields, self.selected_fields = func, list(removed_fields or ()), selected_fields
        # `nullable` is the last item, behind a codec in fields of Petastorm's schemas.
        self.edit_fields = {
            str(each[0]): (np.dtype(each[1]), tuple(each[2]), len(each) > 3 and bool(each[-1]))
            for each in edit_fields or ()
        }

    def frames(self, columns: Columns) -> Columns:
        """Transform rows as one frame."""
        if self.func is None:
            return self._chosen(columns)
        # Imported here: loading pandas takes a tenth of a rank's start, and few transforms take frames.
        import pandas as pd

        made = self.func(pd.DataFrame({name: pd.Series(_cells(values)) for name, values in columns.items()}))
        if not isinstance(made, pd.DataFrame):
            raise DataError("", f"the transform must return a frame, got {type(made).__name__}")
        if not made.columns.is_unique:
            raise DataError(str(made.columns[made.columns.duplicated()][0]), "is in the transform's frame twice")
        return self._chosen(
            {str(name): self._from_series(str(name), made[name], columns.get(str(name))) for name in made.columns}
        )

    def rows(self, columns: Columns) -> Columns:
        """Transform rows one by one."""
        if self.func is None:
            return self._chosen(columns)
        cells = {name: _cells(values) for name, values in columns.items()}
        count = len(next(iter(cells.values())))
        made = [self._row(self.func({name: each[place] for name, each in cells.items()})) for place in range(count)]
        if not made:
            return self._chosen(columns)
        for row in made:
            if other := row.keys() ^ made[0].keys():
                raise DataError(min(other), "is in some rows of the transform only; return the same columns for each")
        return {name: self.column(name, [row[name] for row in made]) for name in made[0]}

    def column(self, name: str, cells: Sequence[object]) -> Values:
        """Return a column's cells, one per row, as an array of the type and shape in `edit_fields`, if it has them.

        Raises `DataError` for cells that make no such array."""
        try:
            return self._array_of(name, cells)
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(name, f"the transform's rows make no column: {error}") from error

    def _row(self, made: object) -> dict[str, Any]:
        if not isinstance(made, Mapping):
            raise DataError("", f"the transform must return a dictionary for a row, got {type(made).__name__}")
        return self._chosen(made)

    def _array_of(self, name: str, cells: Sequence[object]) -> Values:
        wanted = self.edit_fields.get(name)
        # Texts and bytes are objects, as in columns that are read.
        kind = None if wanted is None else np.dtype(object) if wanted[0].kind in "US" else wanted[0]
        first = cells[0] if len(cells) else None
        arrays = isinstance(next((cell for cell in cells if cell is not None), None), (np.ndarray, list, tuple))
        if arrays and (nulls := sum(cell is None for cell in cells)):
            raise DataError(name, f"the transform has left {nulls} nulls beside its arrays; fill them in it")
        if isinstance(first, (datetime.datetime, datetime.timedelta)):
            cells = _as_stored(name, cells, kind)
        if wanted is not None and None not in wanted[1]:
            return _of_shape(name, _typed(name, cells, kind), wanted[1])
        if arrays:
            made = [_typed(name, cell, kind) for cell in cells]
            if len({each.shape for each in made}) == 1:
                return np.stack(made)
            return Ragged(np.concatenate(made), np.concatenate([[0], np.cumsum([len(each) for each in made])]))
        if isinstance(first, (str, bytes)):
            return np.array(cells, object)
        if wanted is None and isinstance(first, _STORED):
            table = pa.table({name: cells})
            (field,) = plan_fields(table.schema, [name], table, FieldOptions())
            return field.values(table[name])
        return _typed(name, cells, kind)

    def _from_series(self, name: str, series: "pd.Series", given: Values | None) -> Values:
        """Return a frame's column with its dtype there; times have the unit of `given`, the column before."""
        if getattr(series.dtype, "tz", None) is not None:
            series = series.dt.tz_convert(None)
        if name in self.edit_fields:
            return self.column(name, series.to_list() if series.dtype == object else series.to_numpy())
        missing = int(series.isna().sum())
        # NaN is a value, and objects are the function's own. Integers would become floats where some are missing.
        if missing and series.dtype.kind != "f" and series.dtype != object:
            raise DataError(name, f"the transform gives no value for {missing} of {len(series)} rows; fill them in it")
        values: Array = series.to_numpy()
        if values.dtype.kind == "O":
            return self.column(name, series.to_list())
        if isinstance(given, np.ndarray) and values.dtype.kind == given.dtype.kind and values.dtype.kind in "mM":
            # pandas has no days.
            values, made = values.astype(given.dtype), values
            if not np.array_equal(values, made):
                raise DataError(name, f"was {given.dtype}, and now has finer times; name its type in edit_fields")
        return np.require(values, requirements=["C", "W"])

    def _chosen(self, columns: Mapping[str, T]) -> dict[str, T]:
        names = [name for name in columns if name not in self.removed_fields]
        if self.selected_fields is not None:
            missing = [name for name in self.selected_fields if name not in columns]
            if missing:
                raise DataError(missing[0], f"is in selected_fields, but the rows have {', '.join(columns)}")
            names = list(self.selected_fields)
        return {name: columns[name] for name in names}


def transform_schema(schema: pa.Schema, transform_spec: TransformSpec) -> pa.Schema:
    """Return the Arrow schema of rows of `schema` after a transform; `edit_fields` come last, arrays as lists.

    Raises `DataError` for a type in `edit_fields` that Arrow lacks, and for an unknown name in `selected_fields`."""
    fields = {field.name: field for field in schema if field.name not in transform_spec.edit_fields}
    for name, (dtype, shape, nullable) in transform_spec.edit_fields.items():
        try:
            kind = pa.from_numpy_dtype(dtype)
        except pa.ArrowNotImplementedError as error:
            raise DataError(name, f"Arrow has no type for {dtype} ({error}); name another in edit_fields") from error
        for length in reversed(shape):
            kind = pa.list_(kind, -1 if length is None else length)
        fields[name] = pa.field(name, kind, nullable)
    return pa.schema(transform_spec._chosen(fields).values())


def _cells(values: Values) -> Array | list[Array]:
    """Return one cell per row, for a frame's column or a row's dictionary."""
    if isinstance(values, Ragged):
        return values.rows()
    array = values.dense() if isinstance(values, SparseRows) else values
    return array if array.ndim == 1 else list(array)


def _typed(name: str, cells: object, kind: np.dtype[Any] | None) -> Array:
    """Return cells as an array of a type of `edit_fields`, or of their own; fractions are cut off for integers.

    Raises `DataError` for numbers that integers of the type do not hold."""
    if kind is None or kind.hasobject:
        return np.array(cells, kind)
    found = np.asarray(cells)
    if found.dtype.hasobject:
        return np.array(cells, kind)
    with np.errstate(invalid="ignore"):
        made: Array = found.astype(kind)
    if kind.kind in "iu" and found.dtype.kind in "iuf":
        whole = np.trunc(found) if found.dtype.kind == "f" else found
        if not np.array_equal(whole, made):
            lost = whole[whole != made].flat[0]
            raise DataError(name, f"has {lost}, which {kind}, its type in edit_fields, cannot hold")
    return made


def _of_shape(name: str, array: Array, shape: tuple[int | None, ...]) -> Array:
    """Return an array whose rows have a shape of `edit_fields`, in which they may be flat; raises `DataError`."""
    rows = array.shape[1:]
    lengths = [length for length in shape if length is not None]
    if rows != shape and len(array) and (len(rows) > 1 or math.prod(rows) != math.prod(lengths)):
        raise DataError(name, f"has rows of shape {rows}, and shape {shape} in edit_fields")
    return array.reshape(len(array), *lengths)


def _as_stored(name: str, times: Sequence[Any], kind: np.dtype[Any] | None) -> Sequence[object]:
    """Return times and spans of pandas as NumPy's if some have nanoseconds, which Python's classes would lose.

    Raises `DataError` for nanoseconds of a column without a type in `edit_fields`, which gets microseconds."""
    if not any(getattr(each, "nanosecond", 0) or getattr(each, "nanoseconds", 0) for each in times):
        return times
    if kind is None:
        raise DataError(name, "has nanoseconds, and times in cells become microseconds; name its type in edit_fields")
    return [each.to_numpy() for each in times]
