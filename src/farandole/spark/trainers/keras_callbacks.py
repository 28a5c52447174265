"""Callbacks around those of the user in a `KerasEstimator`'s fit: values of all ranks, checkpoints, one end for all."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np

import farandole.keras as hvd
from farandole.core.operations.objects import allgather_object
from farandole.spark.trainers.report import Meter, Record
from farandole.spark.trainers.run import Run, sum_over_ranks

__all__ = ["EpochEnd", "EpochValues"]


class _Trainer(Protocol):
    run: Run
    record: Record
    outputs: list[tuple[str, list[int]]]


class EpochValues(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    """Callback before the user's own: seeds an epoch, reports its steps, and makes its values those of all ranks.

    Losses are means over the rows of all ranks. So are metrics that are means over rows; others, such as AUC, are means
    over ranks, each with the weight of its rows.
    """

    def __init__(self, trainer: _Trainer) -> None:
        super().__init__()
        self._trainer, self._run = trainer, trainer.run
        self._epoch, self._free, self._waited, self._validated = 0, 0.0, 0.0, 0
        self._kept: dict[int, list[Any]] | None = None

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Begin to count."""
        self._run.begin(epoch)
        self._losses = _Losses(self.model)
        self._epoch, self._meter, self._validated = epoch, Meter(()), 0
        self._free = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Remember the metrics before a batch without rows; before the first, seed all random generators.

        So a resumed run equals an uninterrupted one. The first epoch of a `fit` draws a number before its first batch
        on Keras' torch backend, the others do not."""
        self._waited = time.perf_counter() - self._free
        if batch == 0:
            seed = self._run.seed(self._epoch)
            keras.utils.set_random_seed(seed)
            for place, variable in enumerate(_random_states(self.model)):
                variable.assign(np.array([seed, place]).astype(variable.dtype))
        self._keep(self._run.rows_of(self._epoch, batch))

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the step, and take the row that did not count out of the metrics."""
        rows = self._run.rows_of(self._epoch, batch)
        share = self._run.rows_of_all(self._epoch, batch) / self._run.size
        loss = self._losses.add(logs or {}, rows, share)
        self._put_back()
        self._meter.add(rows, ())
        self._meter.count_waiting(self._waited)
        self._run.done(rows, loss if rows else None, self._waited)
        self._free = time.perf_counter()

    def on_test_begin(self, logs: object = None) -> None:
        """Give all ranks rank 0's running statistics, with which they validate."""
        hvd.broadcast_variables(self.model.non_trainable_weights, root_rank=0)

    def on_test_batch_begin(self, batch: int, logs: object = None) -> None:
        """Remember the metrics before a batch without rows."""
        held = self._run.rows.validate
        assert held is not None
        rows = held.plan.batch(self._run.rank, batch)
        self._validated += rows
        self._keep(rows)

    def on_test_batch_end(self, batch: int, logs: object = None) -> None:
        """Take the row that did not count out of the metrics."""
        self._put_back()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the values of this rank by those of all ranks; a collective."""
        assert logs is not None
        if not self._run.validation_steps:
            hvd.broadcast_variables(self.model.non_trainable_weights, root_rank=0)
        _, speed = self._meter.over_ranks(sum_over_ranks, self._run.size)
        mine = {name: float(value) for name, value in logs.items()}
        # How many rows each value counts with. A loss has been summed over rows already.
        weights = {name: float(self._validated if name.startswith("val_") else self._meter.rows) for name in mine}
        sums = {name: weights[name] * value if weights[name] else 0.0 for name, value in mine.items()}
        for name, total in self._losses.sums.items():
            sums[name], weights[name] = total, self._losses.share
        every = allgather_object((sums, weights))
        for name in mine:
            logs[name] = math.fsum(each[name] for each, _ in every) / math.fsum(each[name] for _, each in every)
        self._trainer.record = {name: float(value) for name, value in logs.items()} | speed

    def _keep(self, rows: int) -> None:
        """Remember the metrics before a step without rows, which takes a row that must not count."""
        if not rows:
            self._kept = {
                id(metric): [keras.ops.convert_to_numpy(each) for each in metric.variables]
                for metric in self.model.metrics
            }

    def _put_back(self) -> None:
        if self._kept is None:
            return
        for metric in self.model.metrics:  # on JAX, reading `model` brings the variables up to date
            values = self._kept.get(id(metric), [])
            if len(values) != len(metric.variables):
                metric.reset_state()  # the step has built it
                continue
            for variable, value in zip(metric.variables, values, strict=True):
                variable.assign(value)
        self._kept = None


class EpochEnd(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    """Callback after the user's own: ends the epoch for all ranks, and stops all of them when one stops."""

    def __init__(self, trainer: _Trainer, folder: Path) -> None:
        super().__init__()
        self._trainer, self._run, self._folder = trainer, trainer.run, folder

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Write the checkpoint, and the files of the user's ModelCheckpoint in `folder`."""
        stops: bool = any(allgather_object(bool(self.model.stop_training)))
        self.model.stop_training = stops
        self._run.finish(epoch, self._trainer.record, self._trainer.outputs, stopped=stops)
        store = self._run.plan.store
        if store is not None and any(self._folder.iterdir()):
            store.upload(self._folder, store.get_run_path(self._run.plan.run_id))


class _Losses:
    """Sums of an epoch's losses over rows, from Keras' own running means.

    A batch's loss is a mean over rows times the batch's weight, plus regularization. The mean of these over ranks is
    that over all rows of the step, so each counts with the step's rows per rank; Keras counts it with its own rows.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._totals: dict[str, float] = {}
        self._rows = 0
        self.sums: dict[str, float] = {}
        self.share = 0.0

    def add(self, logs: Mapping[str, Any], rows: int, share: float) -> float | None:
        """Add a batch of `rows` rows, given the running means after it; return its loss."""
        self.share += share
        counted = max(1, rows)
        if not self.sums:
            # The first batch has made the trackers of several outputs' losses.
            names = ["loss", *(each.name for each in self._model._compile_loss.metrics)]
            self.sums = {name: 0.0 for name in logs if name in names}
            self._totals = dict.fromkeys(self.sums, 0.0)
        values = {}
        for name in self.sums:
            total = float(logs[name]) * (self._rows + counted)
            values[name] = (total - self._totals[name]) / counted
            self.sums[name] += share * values[name]
            if rows:
                self._totals[name] = total
        self._rows += rows
        return values.get("loss")


def _random_states(model: Any) -> list[Any]:
    """Return the states of the layers' random generators."""
    return [each for each in model.non_trainable_variables if each.name.startswith("seed_generator_state")]
