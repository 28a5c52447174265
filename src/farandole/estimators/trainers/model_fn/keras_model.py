"""Compiled Keras models instead of model functions, with TensorFlow's checkpoints and SavedModels."""

from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import farandole.keras as hvd_keras
import farandole.tensorflow as hvd
from farandole.core.operations.objects import allgather_object
from farandole.data import Number
from farandole.errors import ConfigError
from farandole.estimators.trainers.keras.model import Inputs, outputs_of
from farandole.estimators.trainers.model_fn.frozen_graph import FrozenGraph, freeze_saved_model
from farandole.estimators.trainers.model_fn.job import Batch, Batches, ModelFnJob, Program, Table
from farandole.keras.front import Front


class KerasProgram(Program):
    """A compiled Keras model.

    The optimizer is made distributed unless the user has done so. Its learning rate is the user's, in resumed runs too.
    """

    def __init__(self, job: ModelFnJob, table: Table, folder: Path | None, model: keras.Model) -> None:
        """Load the last checkpoint in `folder`, which only rank 0 has, and broadcast it. A collective."""
        if keras.config.backend() != "tensorflow":
            raise ConfigError("modelFn", f"gives a Keras model of the {keras.config.backend()} backend; use tensorflow")
        if getattr(model, "optimizer", None) is None or not model.compiled:
            raise ConfigError("modelFn", "gives a Keras model that is not compiled")
        if table.label[0] == "string":
            raise ConfigError("labelCol", f"{job.label_col!r} holds texts, on which Keras has no loss; index them")
        super().__init__(folder)
        self._model = model
        self._inputs = _inputs(model, job, table)
        model(self._inputs.arrays(_zeros(table)))  # builds a subclassed model
        is_distributed: bool = isinstance(model.optimizer, Front)
        if not is_distributed:
            model.optimizer = hvd_keras.DistributedOptimizer(model.optimizer)
        model.jit_compile = False  # XLA cannot compile TensorFlow's collectives
        model.optimizer.build(model.trainable_variables)
        keras.utils.set_random_seed(job.seed + hvd.rank())
        self._count = tf.Variable(0, dtype=tf.int64)
        self._table = table
        self._manager: tf.train.CheckpointManager | None = None
        if folder is not None:
            held = tf.train.Checkpoint(model=model, optimizer=model.optimizer, global_step=self._count)
            self._manager = tf.train.CheckpointManager(held, str(folder), max_to_keep=5, checkpoint_name="model.ckpt")
            rate = _rate(model.optimizer)
            if self._manager.latest_checkpoint:
                held.restore(self._manager.latest_checkpoint).assert_existing_objects_matched()
            if rate is not None:
                model.optimizer.learning_rate = rate
        hvd.broadcast_variables([*model.weights, *model.optimizer.variables, self._count], root_rank=0)

    @property
    def step(self) -> int:
        """Steps that are finished."""
        return int(self._count)

    @property
    def stops(self) -> bool:
        """Return True once `stop_training` of the model is set."""
        return bool(getattr(self._model, "stop_training", False))

    def train(self, batch: Batch) -> float:
        """Take one step."""
        features, labels = batch
        self._model.reset_metrics()  # otherwise the loss would be the mean over all steps
        got = self._model.train_on_batch(self._inputs.arrays(features), labels, return_dict=True)
        self._count.assign_add(1)
        return float(got["loss"])

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        assert self._manager is not None, "only rank 0 saves"
        self._manager.save(checkpoint_number=self.step)

    def evaluate(self, folder: Path | None, batches: Batches) -> dict[str, object]:
        """Evaluate with rank 0's running statistics. Metric variables are sums over rows, and are summed over ranks."""
        model = self._model
        hvd.broadcast_variables(model.non_trainable_weights, root_rank=0)
        model.reset_metrics()
        for features, labels in batches:
            model.test_on_batch(self._inputs.arrays(features), labels)
        sums = [each for metric in model.metrics for each in metric.variables]
        every = allgather_object([keras.ops.convert_to_numpy(each) for each in sums])
        for variable, values in zip(sums, zip(*every, strict=True), strict=True):
            variable.assign(np.sum(values, axis=0))
        return {name: np.asarray(value) for name, value in model.get_metrics_result().items()}

    def export(self, folder: Path, to: Path) -> FrozenGraph:
        """Write the SavedModel, whose signature names features and outputs; return its graph without variables."""
        model, inputs = self._model, self._inputs

        @tf.function  # type: ignore[untyped-decorator]  # TensorFlow ships no types
        def serve(**features: tf.Tensor) -> dict[str, tf.Tensor]:
            given = [
                tf.reshape(
                    tf.cast(features[name], dtype), [-1, *(features[name].shape[1:] if shape is None else shape)]
                )
                for name, dtype, shape in zip(inputs.columns, inputs.dtypes, inputs.shapes, strict=True)
            ]
            made = model(inputs.structured(given), training=False)
            if isinstance(made, Mapping):
                return dict(made)
            outputs = outputs_of(made)
            return (
                {"predictions": outputs[0]}
                if len(outputs) == 1
                else dict(zip(model.output_names, outputs, strict=True))
            )

        signature = {
            name: tf.TensorSpec([None] if width is None else [None, width], dtype, name=name)
            for name, (dtype, width) in self._table.features.items()
        }
        module = tf.Module()
        module.held = [each.value for each in model.variables]
        module.model = model  # has the lookup tables of its layers
        tf.saved_model.save(module, str(to), signatures={"serving_default": serve.get_concrete_function(**signature)})
        return freeze_saved_model(str(to), "serve", "serving_default")


def _inputs(model: keras.Model, job: ModelFnJob, table: Table) -> Inputs:
    """Assign features to the model's inputs by name, or in the order of `featureMapping` if the names differ."""
    keys = list(table.features)
    named = getattr(model, "input_names", None)
    return Inputs.of(model, named if named is not None and set(named) == set(keys) else keys)


def _zeros(table: Table) -> dict[str, NDArray[Number]]:
    return {
        name: np.array([b""], object) if dtype == "string" else np.zeros([1] if width is None else [1, width], dtype)
        for name, (dtype, width) in table.features.items()
    }


def _rate(optimizer: keras.optimizers.Optimizer) -> float | None:
    rate = getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
    return float(rate) if isinstance(rate, keras.Variable) else None
