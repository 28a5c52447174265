"""A rank's rows as the feed left them: agreed on between ranks, split, and planned."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from farandole.data import ArrowShard, Column, Gather, LocalPlan, ShardLoader, agree_on_column, validation_mask
from farandole.errors import DataError

# Names of columns in the feed. The user's own names may hold dots, which Spark reads as fields of structs.
HASH = "hash"
VALIDATES = "validates"

_ROWS_AT_ONCE = 1 << 14  # that are copied out of the file to look at them


def fed_as(place: int) -> str:
    """Return the name in the feed of the column at `place` in `RowsWanted.columns`."""
    return f"column{place}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsWanted:
    """What the estimator asks of the rows; the same on every rank."""

    columns: tuple[str, ...]
    validation: float | None  # fraction of rows; None: those that the validation column chose, if there is one
    validation_col: str | None
    batch_size: int
    val_batch_size: int
    shuffle: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """One rank's share, in batches."""

    train: ShardLoader
    validate: ShardLoader | None
    kinds: Mapping[str, str]  # column -> "float32[64]", for the log
    nans: Mapping[str, int]  # column -> rows of all ranks that hold NaN; columns without any are left out


def open_rows(path: Path, wanted: RowsWanted, *, seed: int, rank: int, gather: Gather) -> Rows:
    """Open this rank's file and agree with the other ranks, through two calls of `gather`, on what an epoch is.

    Raises `DataError`, the same on every rank, for nulls, ragged arrays, and when no row is left to train on.
    """
    shard = ArrowShard(path)
    fed = {name: fed_as(place) for place, name in enumerate(wanted.columns)}
    if wanted.validation_col is not None:
        fed[wanted.validation_col] = VALIDATES
    seen = gather([replace(shard.facts(there), name=name) for name, there in fed.items()])
    columns, kinds = {}, {}
    for facts in zip(*seen, strict=True):
        name, dtype, width = facts[0].name, facts[0].dtype, agree_on_column(facts)
        columns[name] = shard.column(fed[name], width)
        kinds[name] = dtype if width is None else f"{dtype}[{width}]"

    everything = np.arange(shard.rows)
    hashes = shard.column(HASH, None).take(everything).astype(np.int64, copy=False)
    # By content, not by arrival: Spark may deliver the same rows in another order when it evaluates them again.
    order = np.argsort(hashes, kind="stable")
    if wanted.validation_col is not None:
        validates = columns.pop(wanted.validation_col).take(everything) != 0
    else:
        validates = validation_mask(hashes, fraction=wanted.validation or 0.0, seed=seed)
    parts = order[~validates[order]], order[validates[order]]

    holding = [_rows_with_nan(column, shard.rows) for column in columns.values()]
    counts = gather([*(len(part) for part in parts), *holding])
    train_rows, val_rows = (tuple(count[part] for count in counts) for part in (0, 1))
    nans = {name: sum(count[place] for count in counts) for place, name in enumerate(columns, len(parts))}
    if not sum(train_rows):
        raise DataError(wanted.columns[0], f"all {sum(val_rows)} rows validate; none is left to train on")
    train_plan = LocalPlan(rows=train_rows, batch_size=wanted.batch_size)
    val_plan = LocalPlan(rows=val_rows, batch_size=wanted.val_batch_size)
    order_seed = seed if wanted.shuffle else None
    return Rows(
        train=ShardLoader(columns=columns, rows=parts[0], plan=train_plan, rank=rank, seed=order_seed),
        validate=ShardLoader(columns=columns, rows=parts[1], plan=val_plan, rank=rank, seed=None)
        if sum(val_rows)
        else None,
        kinds=kinds,
        nans={name: count for name, count in nans.items() if count},
    )


def _rows_with_nan(column: Column, rows: int) -> int:
    if column.windows.dtype.kind != "f":
        return 0
    found = 0
    for first in range(0, rows, _ROWS_AT_ONCE):
        values = column.take(np.arange(first, min(rows, first + _ROWS_AT_ONCE)))
        found += int(np.isnan(values.reshape(len(values), -1)).any(1).sum())
    return found
