"""Batches of a data module for a `TorchEstimator`: dictionaries of tensors by column."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from farandole.data import ShardBatch
from farandole.errors import ConfigError
from farandole.estimators.trainers.module_batches import ModuleBatches, RankLoader
from farandole.estimators.trainers.run import Run


class TorchModule(ModuleBatches):
    """A rank's data module, and its batches as the trainer takes them.

    A batch with as many rows as the loader's in the same step is weighted by its rows, so that a step's gradient is the
    mean over all rows. A batch of another length counts as one rank's share."""

    def __init__(self, kind: Callable[..., object], run: Run) -> None:
        super().__init__(kind, run, self._tensors)

    def epoch(self, epoch: int) -> Iterator[ShardBatch]:
        """Yield the batches of an epoch."""
        run, plan = self._run, self._run.rows.train.plan
        for step, given in enumerate(self.given(epoch)):
            place = run.place(epoch, step) % plan.steps
            yield self._batch(given, self._loader, plan.batch(run.rank, place), plan.weight(run.rank, place))

    def validation(self) -> Iterator[ShardBatch]:
        """Yield the batches for validation; each call begins with the first one."""
        for step, given in enumerate(self.given_to_validate()):
            yield self._batch(given, self._held, self._run.validation_rows(step), 1.0)

    def _tensors(self, batch: ShardBatch, training: bool) -> dict[str, Tensor]:
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
