"""Checks of training with tf_keras (Keras 2) on two ranks, compared with one process that has all rows."""

import copy
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorflow as tf
import tf_keras as keras

import farandole.keras as hvd
import farandole.tensorflow as hvd_tf
from farandole.keras.front import Front
from helpers.keras_models import EPOCHS, ROWS, STEPS, assert_refused, assert_same, rows, values

KINDS = {"current": keras.optimizers, "legacy": keras.optimizers.legacy}


def build(seed: int = 3, **options: Any) -> Any:
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(7, activation="tanh", **options), keras.layers.Dense(2, **options)]
    )
    random = np.random.default_rng(seed)
    model.set_weights([random.normal(size=weight.shape).astype("float32") / 2 for weight in model.weights])
    return model


def fit(model: Any, optimizer: Any, rank: int = 0, size: int = 1, run_eagerly: bool = False, **options: Any) -> Any:
    """Train `model` on the rows of a rank; return it."""
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=run_eagerly)
    inputs, targets = rows(rank, size)
    settings: dict[str, Any] = {"epochs": EPOCHS, "shuffle": False, "verbose": 0, "batch_size": ROWS // size}
    model.fit(inputs, targets, **{**settings, **options})
    return model


def check_training_equals_one_process(rank: int, size: int) -> None:
    decay: Any = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)
    for kind in KINDS.values():
        for kept, eager in (
            (kind.Adam(0.02, clipnorm=0.05), True),
            (kind.SGD(decay, momentum=0.9, global_clipnorm=0.1), False),
        ):
            want = fit(build(), kept.from_config(kept.get_config()))
            optimizer = hvd.DistributedOptimizer(kept)
            assert isinstance(optimizer, kind.Optimizer) and optimizer.__class__ is type(kept)
            got = fit(build(), optimizer, rank, size, run_eagerly=eager)
            assert_same(values(got), values(want))
            assert int(optimizer.iterations) == EPOCHS * STEPS


def check_steps_that_xla_compiles(rank: int, size: int) -> None:
    """On GPUs, Keras 2's optimizers have XLA compile the step of each variable by default."""
    kept = keras.optimizers.Adam(0.02)
    want = values(fit(build(), kept.from_config(kept.get_config())))
    kept.jit_compile = True
    assert_same(values(fit(build(), hvd.DistributedOptimizer(kept), rank, size)), want)


def check_options(rank: int, size: int) -> None:
    want = values(fit(build(), keras.optimizers.SGD(0.1, momentum=0.9)))
    options: dict[str, Any] = {"gradient_predivide_factor": 2.0, "groups": 2, "compression": hvd.Compression.fp16}
    for kind in KINDS.values():
        wrapped = hvd_tf.DistributedOptimizer(kind.SGD(0.1, momentum=0.9), **options)
        assert_same(values(fit(build(), wrapped, rank, size)), want, 2e-2)


def check_several_passes(rank: int, size: int) -> None:
    want = values(fit(build(), keras.optimizers.SGD(0.1), batch_size=ROWS * STEPS))
    for kind, eager in ((keras.optimizers, True), (keras.optimizers, False), (keras.optimizers.legacy, False)):
        optimizer = hvd.DistributedOptimizer(
            kind.SGD(0.1), backward_passes_per_step=STEPS, average_aggregated_gradients=True
        )
        assert_same(values(fit(build(), optimizer, rank, size, run_eagerly=eager)), want)
        assert int(optimizer.iterations) == EPOCHS * STEPS


def check_elastic_states_drop_an_unfinished_step(rank: int, size: int) -> None:
    for kind in KINDS.values():
        model = build()
        optimizer = hvd.DistributedOptimizer(kind.SGD(1.0), backward_passes_per_step=2)
        model.compile(optimizer, "mse")
        state = hvd.elastic.KerasState(model)
        state.sync()
        before, variables = model.get_weights(), model.trainable_variables
        gradients = [tf.ones_like(each) for each in variables]
        if rank == 0:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        state.restore()
        for _ in range(2):
            assert_same(model.get_weights()[0], before[0])
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        assert_same(model.get_weights()[0], before[0] - 2)


def check_several_passes_of_sparse_gradients(rank: int, size: int) -> None:
    """Slices are summed as dense gradients, which are averaged over ranks in every second pass."""
    for kind in KINDS.values():
        for run_eagerly in (True, False):
            optimizer = hvd.DistributedOptimizer(kind.SGD(1.0), sparse_as_dense=True, backward_passes_per_step=2)
            model = keras.Sequential([keras.layers.Embedding(3, 1, embeddings_initializer="ones")])
            model.compile(loss=lambda truth, given: tf.reduce_sum(given), optimizer=optimizer, run_eagerly=run_eagerly)
            for expected in ([1.0, 1.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]):
                model.train_on_batch(np.array([[rank]]), np.zeros((1, 1, 1)))
                assert_same(model.get_weights()[0][:, 0], expected)
            assert int(optimizer.iterations) == 3


def check_local_variables(rank: int, size: int) -> None:
    for kind in KINDS.values():
        model = build()
        optimizer = hvd.PartialDistributedOptimizer(kind.SGD(0.1), local_layers=model.layers[0])
        fit(model, optimizer, rank, size)
        both = hvd.allgather(model.layers[0].kernel.numpy()[None])
        assert not np.array_equal(both[0], both[1])
        both = hvd.allgather(model.layers[1].kernel.numpy()[None])
        np.testing.assert_array_equal(both[0], both[1])


def check_slices_of_local_variables(rank: int, size: int) -> None:
    for kind in KINDS.values():
        variable, optimizer = tf.Variable([[1.0], [1.0]]), hvd.DistributedOptimizer(kind.SGD(1.0))
        optimizer.register_local_var(variable)
        slices = tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([rank]), tf.constant([2, 1]))
        optimizer.apply_gradients([(slices, variable)])
        np.testing.assert_array_equal(variable.numpy(), [[0.0], [1.0]] if rank == 0 else [[1.0], [0.0]])


def check_a_loss_scaler_skips_on_all_ranks(rank: int, size: int) -> None:
    scaler = keras.mixed_precision.LossScaleOptimizer
    for kind in KINDS.values():
        for wrapped in (
            hvd.DistributedOptimizer(scaler(kind.SGD(0.1))),
            scaler(hvd.DistributedOptimizer(kind.SGD(0.1))),
        ):
            variable = tf.Variable([1.0])
            for gradient, want in ((float("inf") if rank else 1.0, 1.0), (1.0 + rank, 0.85)):
                wrapped.apply_gradients([(tf.constant([gradient]), variable)])
                assert_same(variable.numpy(), [want])


def check_a_loss_scaler_skips_for_a_local_variable(rank: int, size: int) -> None:
    scaler = keras.mixed_precision.LossScaleOptimizer
    for kind in KINDS.values():
        for wrapped in (
            hvd.DistributedOptimizer(scaler(kind.SGD(0.1))),
            scaler(hvd.DistributedOptimizer(kind.SGD(0.1))),
        ):
            mine, ours = tf.Variable([1.0]), tf.Variable([1.0])
            wrapped.inner_optimizer.register_local_var(mine)
            for gradient, want in ((float("inf") if rank else 1.0, 1.0), (2.0, 0.9)):
                wrapped.apply_gradients([(tf.constant([gradient]), mine), (tf.constant([1.0]), ours)])
                assert_same(mine.numpy(), [want])
                assert_same(ours.numpy(), [want])


def check_callbacks(rank: int, size: int) -> None:
    """As in one process: ranks start with equal weights, the rate warms up and corrects momentum, metrics are means."""
    want = _with_warm_up()
    for kind in KINDS.values():
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        callbacks = [
            start,
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=1),
            hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1, multiplier=0.1, start_epoch=1),
        ]
        optimizer = hvd.DistributedOptimizer(kind.SGD(0.1, momentum=0.9))
        model = fit(build(seed=rank), optimizer, rank, size, callbacks=callbacks)
        assert start.broadcast_done
        every = hvd.allgather(np.array([[*values(model), *model.history.history["loss"]]]))
        np.testing.assert_array_equal(every[0], every[1])
        assert_same(model.history.history["lr"], [0.1, 0.01])
        assert_same(values(model), want, 1e-4)
    # The same objects in another fit.
    other = build(seed=10 + rank)
    fit(other, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), rank, size, callbacks=callbacks)
    every = hvd.allgather(values(other)[None])
    np.testing.assert_array_equal(every[0], every[1])


def check_metrics_are_those_of_all_rows(rank: int, size: int) -> None:
    model, (inputs, targets) = build(), rows(0, 1)
    parts = slice(0, 3) if rank else slice(3, 8), slice(0, 7) if rank else slice(7, 8)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", metrics=["mae"])
    got = model.fit(
        *(each[parts[0]] for each in (inputs, targets)),
        validation_data=tuple(each[parts[1]] for each in (inputs, targets)),
        batch_size=8,
        callbacks=[hvd.callbacks.MetricAverageCallback()],
        verbose=0,
    ).history
    loss, error = model.evaluate(inputs[:8], targets[:8], verbose=0)
    assert_same([*got.values()], [[loss], [error], [loss], [error]])


def _with_warm_up() -> Any:
    model, velocity, before = build(seed=0), [], 0.1
    inputs, targets = rows()
    velocity = [np.zeros(weight.shape) for weight in model.weights]
    for step in range(EPOCHS * STEPS):
        rate = 0.1 * ((step + 1) / STEPS + 1) / 2 if step < STEPS else 0.01
        part = slice(step % STEPS * ROWS, (step % STEPS + 1) * ROWS)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs[part]) - targets[part]) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        velocity = [0.9 * rate / before * v - rate * g for v, g in zip(velocity, gradients, strict=True)]
        for weight, v in zip(model.weights, velocity, strict=True):
            weight.assign_add(v)
        before = rate
    return values(model)


def check_saved_models(rank: int, size: int, folder: Path) -> None:
    """A model saved and loaded between trainings equals one trained without a break; plain tf_keras reads the file."""
    want = values(fit(build(), keras.optimizers.Adam(0.02), epochs=2 * EPOCHS))
    for kind, suffix in ((keras.optimizers, ".keras"), (keras.optimizers.legacy, ".h5")):
        file = folder / f"{kind.__name__}{suffix}"
        model = fit(build(), hvd.DistributedOptimizer(kind.Adam(0.02)), rank, size)
        if rank == 0:
            model.save(file)
        hvd.barrier()
        plain = keras.models.load_model(file).optimizer
        assert isinstance(plain, kind.Adam) and not isinstance(plain, Front)
        with h5py.File(file) if suffix == ".h5" else nullcontext(file) as given:
            again = hvd.load_model(given, legacy_opts=suffix == ".h5")
        optimizer: Any = again.optimizer
        assert isinstance(optimizer, Front) and int(again.optimizer.iterations) == EPOCHS * STEPS
        inputs, targets = rows(rank, size)
        again.fit(inputs, targets, epochs=EPOCHS, shuffle=False, verbose=0, batch_size=ROWS // size)
        assert_same(values(again), want)


class Renamed(keras.optimizers.SGD):  # type: ignore[misc]  # Keras ships no types
    """Custom optimizer of a program."""


def check_a_function_makes_the_loaded_optimizer(rank: int, size: int, folder: Path) -> None:
    """As in Horovod, the function is called with the config, also for a legacy optimizer in HDF5."""
    legacy = type("Renamed", (keras.optimizers.legacy.SGD,), {})
    for kind, suffix in ((Renamed, ".keras"), (Renamed, ".h5"), (legacy, ".h5")):
        file = folder / f"made{rank}{suffix}"
        fit(build(), hvd.DistributedOptimizer(kind(0.1, momentum=0.9)), rank, size).save(file)
        made: list[Any] = []

        def make(kind: Any = kind, made: list[Any] = made, **config: Any) -> Any:
            made.append(hvd.DistributedOptimizer(kind(**config)))
            return made[-1]

        optimizer: Any = hvd.load_model(file, custom_objects={"Renamed": make}).optimizer
        assert optimizer is made[0] and isinstance(optimizer, Front) and int(made[0].iterations) == EPOCHS * STEPS


def check_the_best_model_is_kept(rank: int, size: int, folder: Path) -> None:
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    best.filepath = str(folder / "best.h5")
    model = fit(
        build(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), rank, size, callbacks=[best] * (not rank)
    )
    assert rank or (best.best == min(model.history.history["loss"]) and keras.models.load_model(best.filepath))


def check_copies(rank: int, size: int) -> None:
    for kind in KINDS.values():
        for base in (kind.Adam(0.3), keras.mixed_precision.LossScaleOptimizer(kind.Adam(0.3))):
            wrapped = hvd.DistributedOptimizer(base)
            another = wrapped.from_config(wrapped.get_config())
            assert type(another).__bases__[0] is type(wrapped).__bases__[0]
            assert another.get_config() == wrapped.get_config()
            for call in (copy.deepcopy, pickle.dumps):
                assert_refused(TypeError, "load_model", lambda call=call, wrapped=wrapped: call(wrapped))


class Plain(keras.optimizers.SGD):  # type: ignore[misc]  # Keras ships no types
    """Custom optimizer that skips Keras's own processing of gradients."""

    def apply_gradients(self, grads_and_vars: Any, **options: Any) -> None:
        for gradient, variable in grads_and_vars:
            variable.assign_sub(gradient)


def check_an_optimizer_that_reduces_nothing(rank: int, size: int) -> None:
    step = hvd.DistributedOptimizer(Plain()).apply_gradients
    pairs = [(tf.constant([1.0]), tf.Variable([1.0]))]
    assert_refused(RuntimeError, "were not reduced", lambda: step(pairs))


def check_what_is_refused(rank: int, size: int) -> None:
    for kind in KINDS.values():
        scaled = keras.mixed_precision.LossScaleOptimizer(kind.SGD(0.1))
        scheduled = kind.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))
        schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, 1.0)
        cases: list[tuple[str, Any]] = [
            ("already", lambda kind=kind: hvd.DistributedOptimizer(hvd.DistributedOptimizer(kind.SGD(0.1)))),
            ("LossScaleOptimizer", lambda scaled=scaled: hvd.DistributedOptimizer(scaled, backward_passes_per_step=2)),
            ("own", lambda scheduled=scheduled, each=schedule: fit(build(), scheduled, callbacks=[each])),
        ]
        for text, call in cases:
            assert_refused(ValueError, text, call)


def check_sync_batch_norm(rank: int, size: int) -> None:
    inputs = np.random.default_rng(0).normal(3.0, 2.0, (ROWS, 3)).astype("float32")
    weights = np.arange(3.0 * ROWS).reshape(ROWS, 3).astype("float32")
    mine = slice(0, 3) if rank == 0 else slice(3, ROWS)

    def step(layer: Any, inputs: Any, weights: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            outputs = layer(inputs, training=True)
            loss = tf.reduce_sum(outputs * weights)
        return [outputs, *tape.gradient(loss, layer.trainable_variables), layer.moving_mean, layer.moving_variance]

    want = step(keras.layers.BatchNormalization(fused=False), tf.constant(inputs), weights)
    for run in (step, tf.function(step)):
        layer = hvd_tf.SyncBatchNormalization()
        layer.build(inputs.shape)
        got = run(layer, tf.constant(inputs[mine]), weights[mine])
        assert_same(got[0].numpy(), want[0].numpy()[mine])
        for place in (1, 2):
            assert_same(hvd_tf.allreduce(got[place], op=hvd.Sum).numpy(), want[place].numpy(), 1e-4)
        for place in (3, 4):
            assert_same(got[place].numpy(), want[place].numpy())
    assert_refused(ValueError, "one axis", lambda: hvd_tf.SyncBatchNormalization(axis=[0, 1])(inputs, training=True))
