"""Pruning of row groups: by least and greatest values, no condition can choose a row of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

__all__ = ["Bounded", "Bounds", "Condition", "bounded_kind", "may_hold", "rows_that_hold"]

_ROW = "farandole row"

Condition: TypeAlias = tuple[str, str, Any]  # ("age", ">=", 18), as pyarrow's readers take them


@dataclass(frozen=True, slots=True)
class Bounds:
    """Known bounds of one column, an item per row group.

    No value but null is less than `least` or greater than `most`, which are null where that is not known; `nulls` are
    counts, or -1."""

    least: pa.Array
    most: pa.Array
    nulls: NDArray[np.int64]


@runtime_checkable
class Bounded(Protocol):
    """A source that knows bounds."""

    def bounds(self, column: str) -> Bounds | None:
        """Return the column's bounds in all row groups; None where nothing is known. Reads nothing."""
        ...


def bounded_kind(kind: pa.DataType) -> bool:
    """Return whether the values of a type can be compared with the bounds in a footer."""
    tests = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_date)
    micros = pa.types.is_timestamp(kind) and kind.unit != "ns"  # bounds come as Python's, which have no nanoseconds
    return micros or kind in (pa.float32(), pa.float64()) or any(test(kind) for test in tests)


def rows_that_hold(table: pa.Table, branches: Sequence[Sequence[Condition]]) -> NDArray[np.bool_]:
    """Return for each row whether all conditions of any branch hold."""
    # Imported here: it loads modules that read files, and only conditions need it.
    import pyarrow.parquet as pq

    numbered = table.append_column(_ROW, pa.array(np.arange(table.num_rows)))
    mask = np.zeros(table.num_rows, bool)
    mask[numbered.filter(pq.filters_to_expression(branches))[_ROW].to_numpy()] = True
    return mask


def may_hold(condition: Condition, bounds: Bounds, rows: Sequence[int]) -> NDArray[np.bool_]:
    """Return for each row group, which has `rows[i]` rows, whether the condition may hold for any of them.

    Bounds are compared as rows would be, by Arrow: a cast that it does on the way never changes which is the greater.
    """
    name, operator, value = condition
    listed = list(value) if operator == "in" else [value]
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
    elif operator == "in" and not floating:  # which `in` compares in the column's own precision
        each = [holds("<=", bounds.least, one) & holds(">=", bounds.most, one) for one in listed]
        possible = np.logical_or.reduce([np.zeros(len(rows), bool), *each])
    elif operator == "!=" and not floating:  # where NaN, which no bound covers, is another value
        possible = holds("!=", bounds.least, value) | holds("!=", bounds.most, value)
    else:
        return np.ones(len(rows), bool)
    some: NDArray[np.bool_] = bounds.nulls != np.array(rows)  # not nothing but nulls, of which no condition holds
    return possible & some
