"""Source of the rows that a condition or predicate chooses, which are counted when it is made."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from farandole.data.formats.columns import check_names
from farandole.data.formats.frames import frame_of
from farandole.data.formats.pruning import Bounds, Condition, may_hold, rows_that_hold
from farandole.data.formats.row_groups import RowGroup
from farandole.data.formats.source import DerivedSource, Source
from farandole.data.loading.settings import check_source
from farandole.data.tables.versions import at_version
from farandole.errors import ConfigError, DataError

__all__ = ["Condition", "Predicate", "SelectedSource", "Where"]

log = logging.getLogger(__name__)

_SCANNERS = 4
_OPERATORS = ("=", "==", "!=", "<", "<=", ">", ">=", "in", "not in")


@runtime_checkable
class Predicate(Protocol):
    """Choice of rows in Python, with the methods of Petastorm's predicates."""

    def get_fields(self) -> Iterable[str]:
        """Return the names of the columns that `do_include` needs."""
        ...

    def do_include(self, values: Mapping[str, object]) -> bool:
        """Return whether the row with these values is chosen."""
        ...


Where: TypeAlias = Predicate | Sequence[Condition] | Sequence[Sequence[Condition]]


class SelectedSource(DerivedSource):
    """The rows of `source` that `where` chooses.

    `where` is a predicate, a list of conditions that must all hold, or a list of such lists, of which one must hold.
    With `frames`, a predicate is first called with each row group as a pandas frame, if pandas is installed. Where it
    returns a Series of bool, that chooses the rows; else it is called with each row.
    Making a source reads the columns that `where` needs, once, except in row groups whose least and greatest values
    show that no row can be chosen. Raises `ConfigError` if `where` is none of these, `DataError` for a column that is
    absent or that cannot be compared with the value.
    """

    def __init__(
        self,
        source: Source,
        where: Where,
        *,
        frames: bool = False,
    ) -> None:
        check_source(source)
        self._where, self._frames = where, frames
        columns, choose, branches = _as_function(where, frames)
        check_names(source.schema, columns)
        _check_values(source.schema, branches)
        possible = _possible(source, branches)
        if not possible.all():
            log.info("%d of %d row groups cannot match and are not read", (~possible).sum(), len(possible))
        asked = [group for group, each in zip(source.row_groups, possible, strict=True) if each]
        with ThreadPoolExecutor(_SCANNERS, thread_name_prefix="farandole-select") as pool:
            chosen = list(pool.map(lambda group: choose(source.read(group, columns)), asked))
        # Keep a bit per row: then the rows that are read are the rows that were counted.
        self._bits: dict[RowGroup, tuple[RowGroup, NDArray[np.uint8]]] = {}
        digest = hashlib.sha256(source.choice.encode())
        for place, group, mask in zip(np.flatnonzero(possible), asked, chosen, strict=True):
            if count := int(mask.sum()):
                bits = np.packbits(mask)
                self._bits[RowGroup(group.file, group.number, count)] = group, bits
                digest.update(b"%d:%b" % (place, bits.tobytes()))
        self._choice = digest.hexdigest()
        super().__init__(source, tuple(self._bits))

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Read these columns of a row group's chosen rows; raises `SourceError` naming the file."""
        whole, bits = self._bits[row_group]
        mask = np.unpackbits(bits, count=whole.rows).astype(bool)
        return self._source.read(whole, columns).filter(pa.array(mask))

    def identity(self, row_group: RowGroup) -> str:
        """Return which rows are chosen, and the source's identity of the row group."""
        whole, bits = self._bits[row_group]
        return f"{self._source.identity(whole)} {whole.rows} {hashlib.sha256(bits.tobytes()).hexdigest()}"

    @property
    def choice(self) -> str:
        """Return an identifier of the rows that the condition has chosen."""
        return self._choice

    def bounds(self, column: str) -> Bounds | None:
        """Return the source's bounds of a column, which hold for the chosen rows, too; None if it has none."""
        known = self._source.bounds(column)
        if known is None:
            return None
        places = {group: place for place, group in enumerate(self._source.row_groups)}
        kept = np.array([places[whole] for whole, _ in self._bits.values()], np.int64)
        # The number of nulls among the chosen rows is unknown.
        return Bounds(known.least.take(kept), known.most.take(kept), np.full(len(kept), -1))

    def at(self, version: int) -> "SelectedSource":
        """Return the rows that `where` chooses in another version of the source."""
        return SelectedSource(at_version(self._source, version), self._where, frames=self._frames)


def _as_function(
    where: Where, frames: bool
) -> tuple[list[str], Callable[[pa.Table], NDArray[np.bool_]], Sequence[Sequence[Condition]]]:
    """Return the columns that `where` needs, a function that chooses rows, and the conditions; [] for a predicate."""
    if isinstance(where, Predicate):
        columns = sorted(where.get_fields())
        if not columns:
            raise ConfigError("where", "is a predicate whose get_fields names no column")
        return columns, partial(_include, where, frames and find_spec("pandas") is not None), []
    branches = _branches(where)
    columns = sorted({condition[0] for branch in branches for condition in branch})
    return columns, lambda table: rows_that_hold(table, branches), branches


def _include(predicate: Predicate, frames: bool, table: pa.Table) -> NDArray[np.bool_]:
    """Return which rows a predicate chooses; raises its errors."""
    refused: Exception | None = None
    if frames:
        import pandas as pd  # loads slowly, and only this needs it

        try:
            made: object = predicate.do_include(frame_of(table))
        except Exception as error:  # raised below if the predicate does not take single rows either
            refused = error
        else:
            # Only a Series: an array may be the answer for one row, whose value is an array.
            if isinstance(made, pd.Series) and len(made) == table.num_rows and made.dtype.kind == "b":
                mask: NDArray[np.bool_] = made.to_numpy(bool)
                return mask
    try:
        return np.array([bool(predicate.do_include(row)) for row in table.to_pylist()], bool)
    except Exception as error:
        if refused is None:
            raise
        raise error from refused


def _branches(where: object) -> list[list[Condition]]:
    """Return `where` as lists of conditions; raises `ConfigError` if it is not of conditions."""
    problem = f"must be a predicate, conditions such as ('age', '>=', 18), or lists of these, got {where!r}"
    if not isinstance(where, Iterable) or isinstance(where, str | bytes | Mapping):
        raise ConfigError("where", problem)
    branches: list[object] = list(where)
    if branches and isinstance(branches[0], list | tuple) and branches[0] and isinstance(branches[0][0], str):
        branches = [branches]
    lists = [branch for branch in branches if isinstance(branch, list | tuple) and branch]
    if not branches or len(lists) < len(branches):
        raise ConfigError("where", problem)
    return [[_condition(each) for each in branch] for branch in lists]


def _condition(found: object) -> Condition:
    """Return `found` as a condition; raises `ConfigError`, with its text, if it is none."""
    if not isinstance(found, list | tuple) or len(found) != 3 or not isinstance(found[0], str):
        raise ConfigError("where", f"has {found!r}; a condition is a column, an operator and a value")
    name, operator, value = found
    if operator not in _OPERATORS:
        raise ConfigError("where", f"has {tuple(found)!r}; operators are {', '.join(_OPERATORS)}")
    if operator in ("in", "not in"):
        if not isinstance(value, Iterable) or isinstance(value, str | bytes):
            raise ConfigError("where", f"has {tuple(found)!r}; '{operator}' takes a list of values")
        value = list(value)
    return name, operator, value


def _check_values(schema: pa.Schema, branches: Sequence[Sequence[Condition]]) -> None:
    """Raise `DataError` for a value that the column's type cannot be compared with."""
    for name, operator, value in (each for branch in branches for each in branch):
        kind = schema.field(name).type
        try:
            # A row, because Arrow does not compare the zones of times without one.
            rows_that_hold(pa.table([pa.nulls(1, kind)], [name]), [[(name, operator, value)]])
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise DataError(name, f"is {kind}, and cannot be compared: {operator} {value!r} ({error})") from error


def _possible(source: Source, branches: Sequence[Sequence[Condition]]) -> NDArray[np.bool_]:
    """Return for each row group whether any row of it may be chosen."""
    rows = [group.rows for group in source.row_groups]
    everywhere = np.ones(len(rows), bool)
    if not branches:
        return everywhere
    known = {name: source.bounds(name) for name in {condition[0] for branch in branches for condition in branch}}
    possible = np.zeros(len(rows), bool)
    for branch in branches:
        held = everywhere
        for condition in branch:
            bounds = known[condition[0]]
            if bounds is not None:
                held = held & may_hold(condition, bounds, rows)
        possible |= held
    return possible
