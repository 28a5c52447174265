"""A rank's rows: agreement between ranks on columns, split into training and validation, and plan of steps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from farandole.data import (
    ArrowShard,
    Column,
    Gather,
    LocalPlan,
    RowColumn,
    ShardLoader,
    agree_on_column,
    validation_mask,
)
from farandole.data.formats.fields import is_vector
from farandole.errors import DataError
from farandole.estimators.trainers.arrow_columns import AnyColumn, HeldColumn, TextColumn, VectorColumn
from farandole.estimators.trainers.moved_rows import even_out
from farandole.estimators.trainers.transformation import (
    RowTransform,
    Transformation,
    TransformedLoader,
    first_row_of_all,
)

# Names of columns in the feed. The user's own names may contain dots, which Spark takes for fields of structs.
HASH = "hash"
VALIDATES = "validates"

_ROWS_AT_ONCE = 1 << 14  # rows that are copied out of the file at once to search for NaN


def fed_as(place: int) -> str:
    """Return the name in the feed of the column at `place` in `RowsWanted.columns`."""
    return f"column{place}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsWanted:
    """The estimator's settings for rows; the same on every rank."""

    columns: tuple[str, ...]
    validation: float | None  # fraction of rows; None: the validation column decides, if there is one
    validation_col: str | None
    batch_size: int
    val_batch_size: int
    shuffle: bool
    transformation: Transformation | None = None  # makes `columns` from the columns of the feed
    keep: bool = False  # keep the columns in memory, in the form of batches
    by_content: bool = False  # rows were shared out by hash; ranks exchange some until all have equally many


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """One rank's share, in batches."""

    train: ShardLoader
    validate: ShardLoader | None
    kinds: Mapping[str, str]  # column -> "float32[64]", for the log
    nans: Mapping[str, int]  # column -> rows of all ranks that hold NaN; columns without any are left out
    held_by: str = ""  # what should choose rows that validate

    @property
    def held(self) -> int:
        """How many rows of all ranks validate."""
        return 0 if self.validate is None else self.validate.plan.total

    def warnings(self) -> list[str]:
        """Return a warning for each column that holds NaN, and one if no row validates that should."""
        total = self.train.plan.total + self.held
        found = [
            f"warning: column {name!r}: {count} of {total} rows hold NaN; fill them or drop these rows first"
            for name, count in self.nans.items()
        ]
        if self.held_by and not self.held:
            found.append(f"warning: none of {total} rows validates by {self.held_by}, so that there is no val_loss")
        return found


def open_rows(path: Path, wanted: RowsWanted, *, seed: int, rank: int, gather: Gather) -> Rows:
    """Open this rank's file; agree with the other ranks, by calls of `gather`, on columns and on the plan of an epoch.

    Raises `DataError`, the same on every rank, for nulls, ragged arrays, and when no row is left to train on;
    `ConfigError` for a transformation that fails on a rank's first row. A collective.
    """
    shard = ArrowShard(path)
    fed = {} if wanted.transformation else {name: fed_as(place) for place, name in enumerate(wanted.columns)}
    widths, kinds = _agree_on_widths(shard, fed, wanted.validation_col, gather)
    columns = _columns(shard, fed, widths)
    holding = [_rows_with_nan(column, shard.rows) for column in columns.values()]
    mine = np.arange(shard.rows)
    if wanted.by_content:
        mine = even_out(path, _hashes(shard), rank=rank, gather=gather)
        shard = ArrowShard(path)
        columns = _columns(shard, fed, widths)

    hashes = _hashes(shard)
    # Ordered by content, not by arrival: Spark may deliver the same rows in another order in another evaluation.
    order = mine[np.argsort(hashes[mine], kind="stable")]
    if wanted.validation_col is not None:
        validates = shard.column(VALIDATES, None).take(np.arange(shard.rows)) != 0
    else:
        validates = validation_mask(hashes, fraction=wanted.validation or 0.0, seed=seed)
    parts = order[~validates[order]], order[validates[order]]

    counts = gather([*(len(part) for part in parts), *holding])
    train_rows, val_rows = (tuple(count[part] for count in counts) for part in (0, 1))
    nans = {name: sum(count[place] for count in counts) for place, name in enumerate(columns, len(parts))}
    if not sum(train_rows):
        raise DataError(wanted.columns[0], f"all {sum(val_rows)} rows validate; none is left to train on")
    transform = None
    if wanted.transformation is not None:
        transform = _transform(shard, wanted, order, seed=seed, rank=rank, gather=gather)
        columns, kinds = dict(transform.raw), transform.kinds()
    if wanted.keep:
        columns, transform = _held(columns, transform, order, shard.rows), None

    def loader(part: int, rows: tuple[int, ...], batch_size: int, order_seed: int | None) -> ShardLoader:
        plan = LocalPlan(rows=rows, batch_size=batch_size)
        made = ShardLoader(columns=columns, rows=parts[part], plan=plan, rank=rank, seed=order_seed)
        if transform is None:
            return made
        return TransformedLoader(**vars(made), transform=transform, validates=part == 1)

    return Rows(
        train=loader(0, train_rows, wanted.batch_size, seed if wanted.shuffle else None),
        validate=loader(1, val_rows, wanted.val_batch_size, None) if sum(val_rows) else None,
        kinds=kinds,
        nans={name: count for name, count in nans.items() if count},
        held_by=f"column {wanted.validation_col!r}" if wanted.validation_col else _fraction(wanted.validation),
    )


def _fraction(validation: float | None) -> str:
    return f"validation={validation}" if validation else ""


def _hashes(shard: ArrowShard) -> NDArray[np.int64]:
    hashes: NDArray[np.int64] = shard.column(HASH, None).take(np.arange(shard.rows)).astype(np.int64, copy=False)
    return hashes


def _agree_on_widths(
    shard: ArrowShard, fed: Mapping[str, str], validation_col: str | None, gather: Gather
) -> tuple[dict[str, int | None], dict[str, str]]:
    """Return the length of each column's arrays (None: numbers) and its type, which all ranks agree on.

    `fed` maps the columns to their names in the file. The validation column is checked, too."""
    mine = []
    for name, there in fed.items():
        column = shard.chunked(there)
        if is_vector(column.type):
            facts = VectorColumn.of(name, column).facts()
        else:
            facts = TextColumn.of(name, column).facts() if TextColumn.holds(column.type) else shard.facts(there)
        mine.append(replace(facts, name=name))
    if validation_col is not None:
        mine.append(replace(shard.facts(VALIDATES), name=validation_col))
    widths, kinds = {}, {}
    for facts_of_all in zip(*gather(mine), strict=True):
        name, dtype, width = facts_of_all[0].name, facts_of_all[0].dtype, agree_on_column(facts_of_all)
        widths[name] = width
        kinds[name] = dtype if width is None else f"{dtype}[{width}]"
    return widths, kinds


def _columns(shard: ArrowShard, fed: Mapping[str, str], widths: Mapping[str, int | None]) -> dict[str, RowColumn]:
    columns: dict[str, RowColumn] = {}
    for name, there in fed.items():
        width, column = widths[name], shard.chunked(there)
        if is_vector(column.type):
            assert width is not None, "vectors have one"
            columns[name] = VectorColumn.of(name, column).of_width(width)
        elif TextColumn.holds(column.type):
            columns[name] = TextColumn.of(name, column)
        else:
            columns[name] = shard.column(there, width)
    return columns


def _transform(
    shard: ArrowShard, wanted: RowsWanted, order: NDArray[np.int64], *, seed: int, rank: int, gather: Gather
) -> RowTransform:
    """Return the transformation of this rank's rows; all ranks agree on the types of its results."""
    assert wanted.transformation is not None
    raw = {
        name: AnyColumn.of(name, shard.chunked(fed_as(place))) for place, name in enumerate(wanted.transformation.fed)
    }
    transform = RowTransform(
        transformation=wanted.transformation, raw=raw, wanted=wanted.columns, facts={}, seed=seed, rank=rank
    )
    return replace(transform, facts=first_row_of_all(transform, order, gather))


def _held(
    columns: Mapping[str, RowColumn], transform: RowTransform | None, order: NDArray[np.int64], rows: int
) -> dict[str, RowColumn]:
    """Return the columns in memory, for all `rows` rows of the file; sparse vectors stay in the file."""
    if transform is not None:
        return {name: HeldColumn(values) for name, values in transform.kept(order, rows).items()}
    everything = np.arange(rows)
    return {
        name: column if isinstance(column, VectorColumn) else HeldColumn(column.take(everything))
        for name, column in columns.items()
    }


def _rows_with_nan(column: RowColumn, rows: int) -> int:
    if isinstance(column, VectorColumn):
        return column.rows_with_nan()
    if isinstance(column, TextColumn):
        return 0
    assert isinstance(column, Column)
    if column.windows.dtype.kind != "f":
        return 0
    found = 0
    for first in range(0, rows, _ROWS_AT_ONCE):
        values = column.take(np.arange(first, min(rows, first + _ROWS_AT_ONCE)))
        found += int(np.isnan(values.reshape(len(values), -1)).any(1).sum())
    return found
