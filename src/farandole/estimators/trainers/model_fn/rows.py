"""Endless batches of equal size from a rank's rows, and batches of its rows for validation."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from farandole.data import ShardLoader, permutation
from farandole.errors import DataError
from farandole.estimators.trainers.model_fn.job import Batch, ModelFnJob, Table
from farandole.estimators.trainers.rows import Rows


def table_of(job: ModelFnJob, rows: Rows) -> Table:
    """Return the columns' types; raises `DataError`, the same on every rank, if a rank has no row to train on."""
    counts = rows.train.plan.rows
    if not min(counts):
        raise DataError(
            next(iter(job.features)),
            f"{sum(counts)} rows to train on leave rank {counts.index(0)} of {len(counts)} none; use fewer ranks",
        )
    kinds: dict[str, tuple[str, int | None]] = {}
    for name, none in rows.train.take(np.empty(0, np.int64)).items():
        kinds[name] = ("string" if none.dtype == object else none.dtype.name, none.shape[1] if none.ndim > 1 else None)
    return Table(features={key: kinds[column] for column, key in job.features.items()}, label=kinds[job.label_col])


def full_batches(job: ModelFnJob, loader: ShardLoader, first: int) -> Iterator[Batch]:
    """Yield batches of `batch_size` rows, from step `first` on, without end.

    Every row comes once before any comes again; a batch may hold the end of one epoch and the start of the next. All
    ranks' batches have the same size, so the mean of their gradients is the mean over all rows of the step.
    """
    size, count = job.rows.batch_size, len(loader.rows)
    place, epoch, order = first * size, -1, loader.rows
    while True:
        parts, missing = [], size
        while missing:
            now, offset = divmod(place, count)
            if now != epoch:
                epoch, order = now, loader.rows[permutation(count, now, loader.rank, seed=job.seed)]
            parts.append(order[offset : offset + missing])
            place += len(parts[-1])
            missing -= len(parts[-1])
        yield _batch(job, loader, np.concatenate(parts))


def validation_batches(job: ModelFnJob, loader: ShardLoader | None) -> Iterator[Batch]:
    """Yield the validation rows once, in batches of at most `batch_size`."""
    rows = np.empty(0, np.int64) if loader is None else loader.rows
    for begin in range(0, len(rows), job.rows.batch_size):
        assert loader is not None
        yield _batch(job, loader, rows[begin : begin + job.rows.batch_size])


def _batch(job: ModelFnJob, loader: ShardLoader, rows: NDArray[np.int64]) -> Batch:
    taken = loader.take(rows)
    return {key: taken[column] for column, key in job.features.items()}, taken[job.label_col]
