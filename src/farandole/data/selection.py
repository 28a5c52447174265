"""Rows chosen by a predicate: counted before the first step, so that an epoch of them is planned like any other."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from farandole.data.fields import check_names
from farandole.data.sources import RowGroup, Source

__all__ = ["Condition", "Predicate", "SelectedSource", "Where"]

_SCANNERS = 4
_ROW = "farandole row"

Condition: TypeAlias = tuple[str, str, Any]  # ("age", ">=", 18), as pyarrow's readers take them


@runtime_checkable
class Predicate(Protocol):
    """A choice made row by row in Python, as Petastorm's predicates are."""

    def get_fields(self) -> Iterable[str]:
        """Name the columns that it looks at."""
        ...

    def do_include(self, values: Mapping[str, Any]) -> bool:
        """Say whether the row with these values is chosen."""
        ...


Where: TypeAlias = Predicate | Sequence[Condition] | Sequence[Sequence[Condition]]


class SelectedSource:
    """The rows of `source` that `where` chooses: a predicate, conditions that all hold, or a list of such lists, one of
    which holds.

    Making one reads the columns that `where` looks at, once. Raises `DataError` for a column that is not there.
    """

    def __init__(
        self,
        source: Source,
        where: Where,
    ) -> None:
        self._source = source
        self.schema = source.schema
        columns, choose = _as_function(where)
        check_names(source.schema, columns)
        with ThreadPoolExecutor(_SCANNERS, thread_name_prefix="farandole-select") as pool:
            chosen = list(pool.map(lambda group: choose(source.read(group, columns)), source.row_groups))
        # A bit per row, kept: what was counted is what will be read.
        self._bits: dict[RowGroup, tuple[RowGroup, NDArray[np.uint8]]] = {}
        for group, mask in zip(source.row_groups, chosen, strict=True):
            if count := int(mask.sum()):
                self._bits[RowGroup(group.file, group.number, count)] = group, np.packbits(mask)
        self.row_groups: Sequence[RowGroup] = tuple(self._bits)

    def nbytes(self, columns: Sequence[str]) -> int:
        """Estimate from the share of rows that are chosen."""
        rows = sum(group.rows for group in self._source.row_groups)
        chosen = sum(group.rows for group in self.row_groups)
        return self._source.nbytes(columns) * chosen // max(1, rows)

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Read these columns of the chosen rows; raises `SourceError` naming the file."""
        whole, bits = self._bits[row_group]
        mask = np.unpackbits(bits, count=whole.rows).astype(bool)
        return self._source.read(whole, columns).filter(pa.array(mask))

    def check(self) -> None:
        """Raise `SourceError` if a file has changed or vanished since it was opened."""
        self._source.check()


def _as_function(
    where: Where,
) -> tuple[list[str], Callable[[pa.Table], NDArray[np.bool_]]]:
    if isinstance(where, Predicate):
        columns = sorted(where.get_fields())

        def include(table: pa.Table) -> NDArray[np.bool_]:
            return np.array([bool(where.do_include(row)) for row in table.to_pylist()], bool)

        return columns, include
    branches: list[Any] = list(where)
    if branches and isinstance(branches[0], tuple):
        branches = [branches]
    if not branches or not all(branches):
        raise ValueError(f"where holds no condition: {where!r}")
    expression = pq.filters_to_expression(branches)

    def holds(table: pa.Table) -> NDArray[np.bool_]:
        numbered = table.append_column(_ROW, pa.array(np.arange(table.num_rows)))
        mask = np.zeros(table.num_rows, bool)
        mask[numbered.filter(expression)[_ROW].to_numpy()] = True
        return mask

    return sorted({condition[0] for branch in branches for condition in branch}), holds
