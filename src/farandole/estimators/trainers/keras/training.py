"""Trainer of Keras models: what each rank of a `KerasEstimator` runs."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import keras
import numpy as np

import farandole.keras as hvd
from farandole.data import ShardBatch
from farandole.errors import ConfigError, DataError
from farandole.estimators.trainers.first_row import (
    SHAPE_ERRORS,
    TOGETHER,
    check_label_shape,
    first_line,
    refused_model,
)
from farandole.estimators.trainers.keras.callbacks import EpochEnd, EpochValues
from farandole.estimators.trainers.keras.devices import own_device, visible_gpus
from farandole.estimators.trainers.keras.model import (
    Array,
    Inputs,
    dump_state,
    held_dtype,
    load_model,
    load_object,
    load_state,
    optimizer_variables,
    outputs_of,
)
from farandole.estimators.trainers.keras.module import KerasModule, Parts
from farandole.estimators.trainers.report import Record
from farandole.estimators.trainers.run import Run, RunPlan
from farandole.estimators.trainers.run import train as train_with
from farandole.keras.backend import Schedule, Tensor, Variable
from farandole.keras.generation import generation_of


@dataclass(frozen=True, kw_only=True)
class KerasJob:
    """The settings of a fit, as each rank receives them."""

    plan: RunPlan
    model: bytes
    optimizer: object  # from `dump_object`, like loss and metrics
    optimizer_state: Sequence[Array]  # empty for an optimizer that has not been used
    loss: object
    loss_weights: Sequence[float] | None
    metrics: object
    callbacks: Sequence[keras.callbacks.Callback]
    checkpoint_callback: keras.callbacks.ModelCheckpoint | None
    inputs: Inputs


def train(job: KerasJob) -> bytes | None:
    """Train a `KerasJob` on this rank; see `trainers.run.train`."""
    with ExitStack() as stack:

        def make(run: Run) -> KerasTrainer:
            stack.enter_context(own_device(run.gpu))
            return KerasTrainer(job, run)

        return train_with(job.plan, make, gpus=visible_gpus)


class KerasTrainer:
    """A rank's model and the arguments of its `fit`; a `Trainer`."""

    def __init__(self, job: KerasJob, run: Run) -> None:
        self.job, self.run, plan = job, run, job.plan
        self.record: Record = {}  # of the epoch that has just ended
        self._best: float | None = None  # of the checkpoint callback, at the end of the restored epoch
        # Ranks need no broadcast of the initial state: all of them load the same model, or the same checkpoint.
        self.model = load_model(job.model)
        self._generation = generation_of(self.model)
        self._floatx: str = self._generation.library.backend.floatx()
        self._row = run.row_of_any()
        self._module = None if plan.data_module is None else KerasModule(plan.data_module, run, self._parts)
        self.outputs: list[tuple[str, list[int]]] = []  # type and shape of each; known when training begins
        self._names: list[str] | None = None  # of outputs in a dictionary
        if self._module is None:
            self._probe(self._parts(ShardBatch(self._row, 1, 1.0), True))
        self.optimizer = hvd.DistributedOptimizer(
            load_object(job.optimizer),
            compression=plan.compression or hvd.Compression.none,
            backward_passes_per_step=plan.passes,
            average_aggregated_gradients=True,
            sparse_as_dense=plan.passes > 1,  # Keras 2 cannot add up slices
        )
        self._variables = optimizer_variables(self.optimizer, self.model.trainable_variables)
        self._assign(job.optimizer_state)
        self._rate: float | None = None  # of one rank; None if it follows a schedule
        rate = self._generation.rate(self.optimizer)
        if not self._generation.has_schedule(self.optimizer):
            self._rate = _number(rate)
            self._rate_place = next(place for place, each in enumerate(self._variables) if each is rate)
        else:
            self._generation.set_schedule(self.optimizer, _scaled(self._generation.library, rate, hvd.size()))

    def restore(self, state: bytes) -> None:
        """Load the weights, and the optimizer's variables with the user's learning rate."""
        weights, optimizer, self._best = load_state(state)
        self.model.set_weights(weights)
        self._assign(optimizer)
        if self._rate is not None:
            self._rate = float(optimizer[self._rate_place])

    def state(self, *, whole: bool) -> bytes:
        """Return the weights; if `whole`, also the optimizer's variables and the checkpoint callback's best value."""
        optimizer, best = None, None
        if whole:
            best = getattr(self.job.checkpoint_callback, "best", None)
            optimizer = [keras.ops.convert_to_numpy(each) for each in self._variables]
            if self._rate is not None:
                # In float64, so that the product with the number of ranks gives this rate's bits again.
                optimizer[self._rate_place] = np.asarray(self._unscaled(), np.float64)
        return dump_state([keras.ops.convert_to_numpy(each) for each in self.model.weights], optimizer, best)

    def train(self, run: Run) -> None:
        """Train the remaining epochs in one call of `fit`."""
        job = self.job
        run.describe(job.inputs.describe(run.rows.kinds))
        if self._rate is not None:
            self.optimizer.learning_rate = self._rate * run.size
        self.model.compile(
            optimizer=self.optimizer,
            loss=load_object(job.loss),
            loss_weights=None if job.loss_weights is None else list(job.loss_weights),
            metrics=self._metrics(),
            # XLA cannot compile TensorFlow's collectives.
            jit_compile="auto" if keras.config.backend() == "jax" else False,
        )
        with ExitStack() as stack:
            folder = None  # a rank that is killed leaves its folder behind, so only one that writes files has one
            if job.checkpoint_callback is not None and run.rank == 0:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farandole-checkpoints-")))
            if self._module is not None and run.epochs:
                stack.enter_context(self._module.opened())
                self._probe(self._module.first())
            callbacks = [EpochValues(self), *job.callbacks, *self._checkpoints(folder)]
            self.model.fit(
                self._batches(),
                steps_per_epoch=run.steps,
                initial_epoch=run.checkpoint.epoch,
                epochs=run.last,
                validation_data=self._held() if run.validation_steps else None,
                validation_steps=run.validation_steps or None,
                callbacks=[*callbacks, EpochEnd(self, folder)],
                verbose=0,
                shuffle=False,
            )

    def _metrics(self) -> object:
        """Return the metrics; in a dictionary if the outputs are, as Keras 2 takes those of several outputs."""
        made, names = load_object(self.job.metrics), self._names
        several = names is not None and len(names) > 1 and len(made) == len(names)
        return dict(zip(names or (), made, strict=True)) if several else made

    def batch(self, given: ShardBatch, *, training: bool) -> tuple[object, ...]:
        """Return inputs, labels and weights of a batch.

        An empty batch becomes a row of weight 0, because every rank takes every step."""
        return self._fitted(self._parts(given, training))

    def _parts(self, given: ShardBatch, training: bool) -> Parts:
        """Return inputs, labels in the columns' own shapes, and one weight per row."""
        columns, weight = given.columns, given.weight if training else 1.0
        if not given.rows:
            # A row of the data: the loss of a made-up one may be infinite, which weight 0 does not make 0.
            columns, weight = self._row, 0.0
        weights = np.full(max(1, given.rows), weight, self._floatx)
        plan = self.job.plan
        if plan.weight_col is not None:
            weights *= columns[plan.weight_col]
        labels = [columns[name] for name in plan.label_cols]
        return Parts(self.job.inputs.arrays(columns), labels, weights)

    def _fitted(self, parts: Parts) -> tuple[object, ...]:
        """Return a batch as the model's `fit` takes it."""
        labels = [self._label(place, values) for place, values in enumerate(parts.labels)]
        given = self._as_outputs(labels)
        weights = parts.weights
        if weights is None:
            return parts.inputs, given
        # A loss has one dimension less than its output, and Keras does not broadcast (rows,) to (rows, numbers).
        each = [weights.reshape(-1, *[1] * (len(shape) - 1)) for _, shape in self.outputs]
        return parts.inputs, given, self._as_outputs(each)

    def _as_outputs(self, arrays: Sequence[Array]) -> Array | tuple[Array, ...] | dict[str, Array]:
        """Return one array per output in the structure of the model's outputs; Keras refuses weights in another one."""
        if self._names is not None:
            return dict(zip(self._names, arrays, strict=True))
        return arrays[0] if len(arrays) == 1 else tuple(arrays)

    def _label(self, place: int, values: Array) -> Array:
        whole = "int32" if values.dtype.itemsize < 8 else held_dtype("int64")
        given, values = values, values.astype(self._floatx if values.dtype.kind == "f" else whole)
        if values.dtype.kind == "i" and not np.array_equal(values, given):
            problem = f"holds integers that {whole} cannot hold, as which JAX takes them; cast the column to double"
            raise DataError(self.job.plan.label_cols[place], problem)
        shapes = self.job.plan.label_shapes
        wanted = list(shapes[place][1:]) if shapes is not None else self.outputs[place][1]
        if shapes is not None:
            check_label_shape(values.shape[1:], wanted)
        # A label with as many numbers as the output takes its shape: losses would broadcast (rows,) against (rows, 1).
        if shapes is not None or int(np.prod(wanted)) == int(np.prod(values.shape[1:])):
            values = values.reshape(len(values), *wanted)
        return values

    def _batches(self) -> Iterator[tuple[object, ...]]:
        if self._module is not None:
            yield from map(self._fitted, self._module.batches())
            return
        for epoch in self.run.epochs:
            for given in self.run.batches(epoch):
                yield self.batch(given, training=True)

    def _held(self) -> object:
        """Return the validation batches for `fit`, the same ones in each epoch.

        A `Sequence`, as Keras 3 does not take `validation_steps` batches from an iterator in each epoch."""
        trainer = self

        class Held(self._generation.library.utils.Sequence):  # type: ignore[misc,name-defined]  # untyped
            def __len__(self) -> int:
                return trainer.run.validation_steps

            def __getitem__(self, index: int) -> tuple[object, ...]:
                return trainer.held_batch(index)

        return Held()

    def held_batch(self, index: int) -> tuple[object, ...]:
        """Return a validation batch."""
        if self._module is not None:
            return self._fitted(self._module.held(index))
        return self.batch(self.run.validation_batch(index), training=False)

    def _checkpoints(self, folder: Path | None) -> list[keras.callbacks.Callback]:
        callback = self.job.checkpoint_callback
        if callback is None or folder is None:
            return []
        callback.filepath = str(folder / Path(str(callback.filepath or "best.keras")).name)
        if self._best is not None:
            callback.best = self._best  # the store holds the file of an earlier attempt
        return [callback]

    def _probe(self, parts: Parts) -> None:
        """Run the first row through the model, and note the type and shape of each output.

        Raises `ConfigError` for a model that does not take the columns, and for labels that do not fit its outputs."""
        job, kinds = self.job, self.run.rows.kinds
        try:
            made = self.model(keras.tree.map_structure(lambda each: each[:1], parts.inputs), training=False)
        except SHAPE_ERRORS as error:
            raise refused_model(first_line(error), job.inputs.describe(kinds), TOGETHER) from error
        given, names = outputs_of(made), job.plan.label_cols
        self._names = sorted(made) if isinstance(made, Mapping) else None
        if len(given) != len(names):
            raise ConfigError("model", f"gives {len(given)} outputs; label_cols {list(names)} need one each")
        self.outputs = [(keras.backend.standardize_dtype(each.dtype), [*each.shape[1:]]) for each in given]
        for (_, shape), name, label in zip(self.outputs, names, parts.labels, strict=True):
            own = [*label.shape[1:]]
            numbers = int(np.prod(own))
            if numbers > 1 and numbers != int(np.prod(shape)) and job.plan.label_shapes is None:
                raise ConfigError(
                    "label_cols",
                    f"label {name!r} has the shape {own}, the model's output {shape}, without the rows; a loss would "
                    "broadcast one against the other: make them equal, or give label_shapes",
                )

    def _unscaled(self) -> float:
        """Return the learning rate for one rank; exactly the user's as long as nothing has changed it."""
        assert self._rate is not None
        now = _number(self._generation.rate(self.optimizer))
        scaled = self._rate * self.run.size
        # Compared in the variable's type, float32.
        return self._rate if now == float(np.float32(scaled)) else now / self.run.size

    def _assign(self, values: Sequence[Array]) -> None:
        wanted = len(self._variables)
        if values and len(values) != wanted:
            raise ConfigError("optimizer", f"was used with {len(values)} variables, and needs {wanted}; make a new one")
        for variable, value in zip(self._variables, values, strict=bool(values)):
            dtype = keras.backend.standardize_dtype(variable.dtype)
            variable.assign(value.astype(dtype) if value.dtype == np.float64 else value)


def _scaled(library: ModuleType, schedule: Schedule, factor: int) -> Schedule:
    """Return a schedule of the library whose learning rate is that of `schedule`, times `factor`."""

    class Scaled(library.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc,name-defined]  # untyped
        def __call__(self, step: Tensor) -> Tensor:
            return schedule(step) * factor

        def get_config(self) -> dict[str, object]:
            return {"schedule": schedule, "factor": factor}

    return Scaled()


def _number(variable: Variable) -> float:
    return float(keras.ops.convert_to_numpy(variable))
