"""Batches of a data module for a `TorchEstimator`: dictionaries of tensors by column."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from farandole.data import ShardBatch
from farandole.errors import ConfigError
from farandole.estimators.data_module import DataModule
from farandole.estimators.trainers.module_batches import RankLoader, endless, open_module
from farandole.estimators.trainers.run import Run

__all__ = ["TorchModule"]


class TorchModule:
    """A rank's data module, and its batches as the trainer takes them.

    A batch with as many rows as the loader's in the same step is weighted by its rows, so that a step's gradient is the
    mean over all rows. A batch of another length counts as one rank's share."""

    _module: DataModule

    def __init__(self, kind: Callable[..., Any], run: Run) -> None:
        self._kind, self._run = kind, run
        self._loader = RankLoader(run.batches, run.steps, self._tensors)
        self._held = RankLoader(lambda epoch: run.validation_batches(), run.validation_steps, self._tensors)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep the module open for `epoch` and `validation`."""
        run = self._run
        with open_module(self._kind, run, self._loader, self._held if run.validation_steps else None) as self._module:
            self._train = endless(self._module.train_data)
            yield

    def epoch(self, epoch: int) -> Iterator[ShardBatch]:
        """Yield the batches of an epoch."""
        run, plan = self._run, self._run.rows.train.plan
        self._loader.epoch = epoch
        for step, given in enumerate(islice(self._train, run.steps)):
            place = (epoch * run.steps + step) % plan.steps
            yield self._batch(given, self._loader, plan.batch(run.rank, place), plan.weight(run.rank, place))

    def validation(self) -> Iterator[ShardBatch]:
        """Yield the batches for validation; each call begins with the first one."""
        run, held = self._run, self._run.rows.validate
        assert held is not None
        for step, given in enumerate(islice(endless(self._module.val_data), run.validation_steps)):
            yield self._batch(given, self._held, held.plan.batch(run.rank, step), 1.0)

    def _tensors(self, batch: ShardBatch) -> dict[str, Tensor]:
        shown = batch if batch.rows else self._run.stand_in()
        return {name: torch.from_numpy(values) for name, values in shown.columns.items()}

    def _batch(self, given: object, loader: RankLoader, planned: int, weight: float) -> ShardBatch:
        if not isinstance(given, Mapping):
            raise ConfigError(
                "data_module", f"must give batches as dictionaries of tensors by column, got {type(given).__name__}"
            )
        wanted = self._run.plan.rows.columns
        if missing := [name for name in wanted if name not in given]:
            raise ConfigError(
                "data_module", f"gives batches without {', '.join(missing)}; they have {', '.join(given)}"
            )
        columns = {name: torch.as_tensor(given[name]).detach().cpu().numpy() for name in wanted}
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ConfigError("data_module", f"gives a batch whose columns have these numbers of rows: {lengths}")
        rows = lengths[wanted[0]]
        if loader.used and rows == (planned or self._run.stand_in().rows):
            return ShardBatch(columns, planned, weight)
        return ShardBatch(columns, rows, 1.0)
