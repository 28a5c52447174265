"""Callbacks around the user's in a `KerasEstimator`'s fit: values over all ranks, checkpoints, a common end."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import keras
import numpy as np

import farandole.keras as hvd
from farandole.core.operations.objects import allgather_object
from farandole.estimators.trainers.keras.metric_sums import Sums, metric_sums, values_over_ranks
from farandole.estimators.trainers.keras.model import Array
from farandole.estimators.trainers.mirror import Mirror
from farandole.estimators.trainers.report import Meter, Record
from farandole.estimators.trainers.run import Run, sum_over_ranks
from farandole.keras.backend import Metric, Model, Variable
from farandole.keras.callbacks.base import CallbackOfBoth
from farandole.keras.generation import generation_of


class _Trainer(Protocol):
    run: Run
    record: Record
    outputs: list[tuple[str, list[int]]]


class EpochValues(CallbackOfBoth):
    """Callback before the user's: seeds an epoch, reports its steps, and replaces its values by those over all ranks.

    Losses and Keras' metrics become those of the rows of all ranks. Metrics with a `result` of a user's become means
    over ranks, each with the weight of its rows.
    """

    def __init__(self, trainer: _Trainer) -> None:
        super().__init__()
        self._trainer, self._run = trainer, trainer.run
        self._epoch, self._waiting_since, self._waited, self._validated = 0, 0.0, 0.0, 0
        self._saved: dict[int, list[Array]] | None = None
        self._held: _Losses | None = None
        self._sums: dict[str, Sums] = {}  # of the metrics of the epoch's training and, by "val_", of its validation

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Begin to count steps and losses."""
        self._run.begin(epoch)
        self._losses = _Losses(self.model)
        self._epoch, self._meter, self._validated, self._held, self._sums = epoch, Meter(()), 0, None, {}
        self._waiting_since = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Save the metrics before a batch without rows; before the first batch, seed all random generators.

        The seeds make a resumed run equal to an uninterrupted one. They are not set in `on_epoch_begin`: on Keras'
        torch backend the first epoch of a `fit` draws a random number before its first batch, and later ones do not."""
        self._waited = time.perf_counter() - self._waiting_since
        if batch == 0:
            seed = self._run.seed(self._epoch)
            generation_of(self.model).library.utils.set_random_seed(seed)
            for place, variable in enumerate(_random_states(self.model)):
                variable.assign(np.array([seed, place]).astype(variable.dtype))
        self._save_metrics(self._run.rows_of(self._epoch, batch))

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Report the step; after a batch without rows, restore the metrics."""
        rows = self._run.rows_of(self._epoch, batch)
        share = self._run.rows_of_all(self._epoch, batch) / self._run.size
        loss = self._losses.add(logs or {}, rows, share)
        self._restore_metrics()
        self._meter.add(rows, ())
        self._meter.count_waiting(self._waited)
        self._run.done(rows, loss if rows else None, self._waited)
        self._waiting_since = time.perf_counter()

    def on_test_begin(self, logs: object = None) -> None:
        """Broadcast rank 0's running statistics, with which all ranks validate. A collective."""
        hvd.broadcast_variables(self.model.non_trainable_weights, root_rank=0)
        self._held = _Losses(self.model)
        self._sums[""] = metric_sums(self.model)  # before Keras resets the metrics

    def on_test_batch_begin(self, batch: int, logs: object = None) -> None:
        """Save the metrics before a batch without rows."""
        rows = self._run.validation_rows(batch)
        self._validated += rows
        self._save_metrics(rows)

    def on_test_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Sum the losses over rows; after a batch without rows, restore the metrics."""
        rows = self._run.validation_rows(batch)
        if self._held is not None:
            self._held.add(logs or {}, rows, rows)
        self._restore_metrics()

    def on_test_end(self, logs: object = None) -> None:
        """Note the sums of the metrics."""
        self._sums["val_"] = metric_sums(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Replace the values of this rank by those over all ranks. A collective."""
        assert logs is not None
        if not self._run.validation_steps:
            hvd.broadcast_variables(self.model.non_trainable_weights, root_rank=0)
            self._sums[""] = metric_sums(self.model)
        _, speed = self._meter.over_ranks(sum_over_ranks, self._run.size)
        mine = {name: float(value) for name, value in logs.items()}
        # The weight of each value, in rows. Losses have been summed over rows already.
        weights = {name: float(self._validated if name.startswith("val_") else self._meter.rows) for name in mine}
        sums = {name: weights[name] * value if weights[name] else 0.0 for name, value in mine.items()}
        losses = {"": self._losses, "val_": self._held or _Losses(self.model)}
        for kind, its in losses.items():
            for name, total in its.sums.items():
                sums[kind + name], weights[kind + name] = total, its.share
        every = allgather_object((sums, weights, self._sums))
        for name in mine:
            logs[name] = math.fsum(each[name] for each, *_ in every) / math.fsum(each[name] for _, each, _ in every)
        for kind in self._sums:
            values = values_over_ranks(self.model, [each[kind] for *_, each in every])
            logs |= {
                kind + name: values[name] for name in values if name not in losses[kind].sums and kind + name in mine
            }
        self._trainer.record = {name: float(value) for name, value in logs.items()} | speed

    def _save_metrics(self, rows: int) -> None:
        """Save the metrics before a step without rows: it takes a row that must not count in them."""
        if not rows:
            self._saved = {
                id(metric): [keras.ops.convert_to_numpy(each) for each in metric.variables]
                for metric in self.model.metrics
            }

    def _restore_metrics(self) -> None:
        if self._saved is None:
            return
        for metric in self.model.metrics:  # on JAX, reading `model` brings the variables up to date
            values = self._saved.get(id(metric), [])
            if len(values) != len(metric.variables):
                metric.reset_state()  # the step has made its variables
                continue
            for variable, value in zip(metric.variables, values, strict=True):
                variable.assign(value)
        self._saved = None


class EpochEnd(CallbackOfBoth):
    """Callback after the user's: ends the epoch on all ranks, and stops all of them when one stops.

    `folder` has the files of the user's ModelCheckpoint; None: this rank writes none."""

    def __init__(self, trainer: _Trainer, folder: Path | None) -> None:
        super().__init__()
        self._trainer, self._run = trainer, trainer.run
        plan, self._mirror = self._run.plan, None
        if plan.store is not None and folder is not None:
            self._mirror = Mirror(folder, plan.store, plan.store.get_run_path(plan.run_id))

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Upload the files that the user's ModelCheckpoint has written, and write the checkpoint. A collective."""
        if self._mirror is not None:
            self._mirror.update()  # first: the checkpoint says that the best model is in the store
        stops: bool = any(allgather_object(bool(self.model.stop_training)))
        self.model.stop_training = stops
        self._run.finish(epoch, self._trainer.record, self._trainer.outputs, stopped=stops)


class _Losses:
    """Sums of an epoch's losses over rows, from Keras' own running means.

    A batch's loss is the mean over its rows times the batch's weight, plus regularization. The mean of these losses
    over ranks is the mean over all rows of the step, so each of them is weighted by the step's rows per rank. Keras
    weights it by the rows of the batch, but a loss of one of several outputs by 1 in a graph of TensorFlow, in which
    the number of rows is unknown.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._seen: dict[str, tuple[float, float]] = {}  # total and weight of the batches so far
        self._trackers: dict[str, Metric] = {}
        self.sums: dict[str, float] = {}
        self.share = 0.0

    def add(self, logs: Mapping[str, float], rows: int, share: float) -> float | None:
        """Add a batch of `rows` rows and return its loss, given the running means and the step's rows per rank."""
        self.share += share
        counted = max(1, rows)
        if not self.sums:
            # The first batch creates the trackers of the losses of several outputs.
            compiled = getattr(self._model, "_compile_loss", None) or self._model.compiled_loss  # of Keras 2
            self._trackers = {each.name: each for each in compiled.metrics}
            self.sums = {name: 0.0 for name in logs if name == "loss" or name in self._trackers}
            self._seen = dict.fromkeys(self.sums, (0.0, 0.0))
        values = {}
        for name in self.sums:
            total_before, weight_before = self._seen[name]
            weight = self._weight(name, weight_before + counted)
            total = float(logs[name]) * weight
            values[name] = (total - total_before) / (weight - weight_before)
            self.sums[name] += share * values[name]
            if rows:
                self._seen[name] = total, weight
        return values.get("loss")

    def _weight(self, name: str, rows: float) -> float:
        """Return the weight that Keras has given to the batches so far, which have `rows` rows."""
        if name not in self._trackers or keras.config.backend() != "tensorflow":
            return rows
        return float(keras.ops.convert_to_numpy(self._trackers[name].count))


def _random_states(model: Model) -> list[Variable]:
    """Return the states of the layers' random generators."""
    return [each for each in model.non_trainable_variables if each.name.startswith("seed_generator_state")]
