"""Pruning of row groups whose least and greatest values show that no row can satisfy a condition."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_ROW = "farandole row"

Condition: TypeAlias = tuple[str, str, object]  # ("age", ">=", 18), as pyarrow's readers take them


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one column, one item per row group.

    Each value that is not null is between `least` and `most`, which are null if unknown. `nulls` are the numbers of
    nulls, -1 if unknown."""

    least: pa.Array
    most: pa.Array
    nulls: NDArray[np.int64]


def bounded_kind(kind: pa.DataType) -> bool:
    """Return whether bounds in a footer can be compared with values of a type."""
    tests = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_date)
    micros = pa.types.is_timestamp(kind) and kind.unit != "ns"  # bounds are Python's datetimes, without nanoseconds
    return micros or kind in (pa.float32(), pa.float64()) or any(test(kind) for test in tests)


def rows_that_hold(table: pa.Table, branches: Sequence[Sequence[Condition]]) -> NDArray[np.bool_]:
    """Return for each row whether all conditions of at least one branch hold."""
    # Imported here: it loads modules that read files, and only conditions need it.
    import pyarrow.parquet as pq

    numbered = table.append_column(_ROW, pa.array(np.arange(table.num_rows)))
    mask = np.zeros(table.num_rows, bool)
    typed = [[_typed(table.schema.field(condition[0]).type, condition) for condition in branch] for branch in branches]
    mask[numbered.filter(pq.filters_to_expression(typed))[_ROW].to_numpy()] = True
    return mask


def _typed(kind: pa.DataType, condition: Condition) -> Condition:
    """Return a condition whose integers are unsigned if the column is; Arrow refuses an int64 beside 2**63."""
    name, operator, value = condition
    several = operator in ("in", "not in")
    values: list[Any] = list(value) if several and isinstance(value, Iterable) else [value]
    if kind != pa.uint64() or not all(isinstance(each, int | np.integer) and 0 <= each < 2**64 for each in values):
        return condition
    typed = pa.array([int(each) for each in values], kind)
    return name, operator, typed if several else typed[0]


def may_hold(condition: Condition, bounds: Bounds, rows: Sequence[int]) -> NDArray[np.bool_]:
    """Return for each row group i, which has `rows[i]` rows, whether the condition may hold for a row of it.

    Arrow compares bounds as it compares rows; its implicit casts never reverse the order of two values.
    """
    name, operator, value = condition
    listed = list(value) if operator == "in" and isinstance(value, Iterable) else [value]
    floating = pa.types.is_floating(bounds.least.type)
    if any(each is None for each in listed):
        return np.ones(len(rows), bool)

    def holds(operator: str, of: pa.Array, value: object) -> NDArray[np.bool_]:
        unknown: NDArray[np.bool_] = of.is_null().to_numpy(zero_copy_only=False)
        return unknown | rows_that_hold(pa.table({name: of}), [[(name, operator, value)]])

    if operator in ("<", "<="):
        possible = holds(operator, bounds.least, value)
    elif operator in (">", ">="):
        possible = holds(operator, bounds.most, value)
    elif operator in ("=", "=="):
        possible = holds("<=", bounds.least, value) & holds(">=", bounds.most, value)
    elif operator == "in" and not floating:  # for floats, `in` compares in the column's own precision
        try:
            each = [holds("<=", bounds.least, one) & holds(">=", bounds.most, one) for one in listed]
        except pa.ArrowException:  # `in` casts values, as of a time in another zone, that are not compared otherwise
            return np.ones(len(rows), bool)
        possible = np.logical_or.reduce([np.zeros(len(rows), bool), *each])
    elif operator == "!=" and not floating:  # floats may be NaN, which differs from any value and has no bounds
        possible = holds("!=", bounds.least, value) | holds("!=", bounds.most, value)
    else:
        return np.ones(len(rows), bool)
    some: NDArray[np.bool_] = bounds.nulls != np.array(rows)  # no condition holds if all rows are null
    return possible & some
