"""Checks of Horovod's callbacks in `fit` on two ranks."""

from pathlib import Path
from typing import Any

import keras
import numpy as np

import farandole.keras as hvd
from helpers.keras_models import ROWS, STEPS, assert_refused, assert_same, build, fit, rows, values


def check_all_start_alike(rank: int, size: int) -> None:
    model, mine = build(seed=rank), keras.optimizers.SGD(0.1 * (rank + 1), momentum=0.9)
    mine.build(model.trainable_variables)
    for velocity in mine.momentums:
        velocity.assign(keras.ops.ones(velocity.shape) * 0.01 * (rank + 1))
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    fit(model, hvd.DistributedOptimizer(mine), rank, size, callbacks=[start])
    assert start.broadcast_done

    alone, plain = build(seed=0), keras.optimizers.SGD(0.1, momentum=0.9)
    plain.build(alone.trainable_variables)
    for velocity in plain.momentums:
        velocity.assign(keras.ops.ones(velocity.shape) * 0.01)
    assert_same(values(model), values(fit(alone, plain)))
    assert float(model.optimizer.learning_rate) == float(plain.learning_rate)


def check_callbacks_serve_several_fits(rank: int, size: int) -> None:
    """Each fit broadcasts, also of another model or of the same one, and warms up over its own number of steps."""
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    warm_up = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=1)
    callbacks, rates = [start, warm_up], list[float]()
    note: Any = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(float(note.model.optimizer.learning_rate))
    )
    models = build(seed=rank), build(seed=10 + rank)
    for model, steps in ((models[0], STEPS), (models[1], 2), (models[1], 2)):
        weight = model.trainable_variables[0]
        weight.assign(weight + rank)
        inputs, targets = (each[: steps * ROWS // size] for each in rows(rank, size))
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.4)), loss="mse")
        model.fit(inputs, targets, batch_size=ROWS // size, callbacks=[*callbacks, note], verbose=0)
        every = hvd.allgather(values(model)[None])
        np.testing.assert_array_equal(every[0], every[1])
    assert_same(rates, [0.4 * (step / steps + 1) / size for steps in (STEPS, 2, 2) for step in range(1, steps + 1)])


def check_a_model_without_a_shape(rank: int, size: int) -> None:
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    fit(
        model,
        hvd.DistributedOptimizer(keras.optimizers.Adam()),
        rank,
        size,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1)],
    )
    trained = np.concatenate([np.ravel(keras.ops.convert_to_numpy(each)) for each in model.trainable_variables])
    every = hvd.allgather(trained[None])
    np.testing.assert_array_equal(every[0], every[1])


def check_local_variables_stay(rank: int, size: int) -> None:
    model = build(seed=rank)
    own = model.layers[0].trainable_variables
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=own)
    fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), rank, size, callbacks=[start])
    want = build(seed=rank).get_weights()[:2] + build(seed=0).get_weights()[2:]
    for got, wanted in zip(model.get_weights(), want, strict=True):
        assert_same(got, wanted)


def check_metrics_are_those_of_all_ranks(rank: int, size: int) -> None:
    """Ranks with different numbers of rows: means are those over all rows, other values are weighted by the rows."""
    inputs, targets = (each[: 2 if rank else 6] for each in rows(rank, size))
    held, others = (each[: 5 if rank else 1] for each in rows(rank, size))
    weights = np.arange(1.0, 1.0 + len(held))

    def fitted(average: Any) -> Any:
        class Last(keras.metrics.Metric):  # type: ignore[misc]  # Keras ships no types
            def update_state(self, *given: Any, **options: Any) -> None: ...
            def result(self) -> Any:
                return keras.ops.ones(()) * rank

        model = build()
        model.compile(
            optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)),
            loss="mse",
            metrics=["mae", Last(name="last")],
            weighted_metrics=[keras.metrics.MeanSquaredError(name="weighted")],
        )
        settings: dict[str, Any] = {"batch_size": 1 if rank else 3, "verbose": 0, "epochs": 2}
        seen: list[Any] = []
        after = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
        both = (held, others, weights)
        model.fit(inputs, targets, validation_data=both, callbacks=[average, after], **settings)
        assert seen[-1] == {name: values[-1] for name, values in model.history.history.items()}
        return model.history.history

    def over_ranks(values: Any, weights: Any) -> float:
        sums = hvd.allreduce(np.array([np.sum(values * weights), np.sum(weights)], np.float64), op=hvd.Sum)
        return float(sums[0] / sums[1])

    outputs = build().predict(inputs, verbose=0), build().predict(held, verbose=0)
    error, held_error = (outputs[0] - targets), (outputs[1] - others)
    ones, held_ones = np.ones(len(error)), np.ones(len(held_error))
    want = {
        "loss": over_ranks(np.mean(error**2, 1), ones),
        "mae": over_ranks(np.mean(np.abs(error), 1), ones),
        "last": 2 / 8,
        "val_loss": over_ranks(np.mean(held_error**2, 1) * weights, held_ones),
        "val_mae": over_ranks(np.mean(np.abs(held_error), 1), held_ones),
        "val_weighted": over_ranks(np.mean(held_error**2, 1), weights),
        "val_last": 5 / 6,
    }
    got = fitted(hvd.callbacks.MetricAverageCallback())
    for name, value in want.items():
        assert_same(got[name], [value] * 2)
    as_horovod = fitted(hvd.callbacks.MetricAverageCallback(weighted=False))
    assert as_horovod["val_last"] == [0.5] * 2
    own = float(np.mean(np.abs(held_error)))
    assert_same(as_horovod["val_mae"], [float(np.mean(hvd.allgather(np.array([own]))))] * 2)


def check_metrics_beside_evaluations_of_ones_own(rank: int, size: int) -> None:
    """Another callback may evaluate the model on one rank, which resets the counts of samples."""
    inputs, targets = rows()
    model = build()
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")

    def evaluate(epoch: int, logs: Any) -> None:
        if rank == 1:
            model.evaluate(inputs, targets, verbose=0)

    seen: dict[str, float] = {}
    callbacks = [
        keras.callbacks.LambdaCallback(on_epoch_end=evaluate),
        hvd.callbacks.MetricAverageCallback(),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.update(logs)),
    ]
    mine = slice(0, 2) if rank else slice(2, 8)
    both = inputs[mine], targets[mine]
    model.fit(*both, batch_size=2, verbose=0, callbacks=callbacks, validation_data=both)
    want = np.mean((model.predict(inputs[:8], verbose=0) - targets[:8]) ** 2)
    assert_same(list(seen.values()), [want] * 2)


def check_metrics_of_several_outputs(rank: int, size: int) -> None:
    """Ranks with different numbers of rows report the metrics of each output as one process with all rows does."""

    def fitted(optimizer: Any, mine: slice, *callbacks: Any) -> Any:
        inputs, targets = (each[mine] for each in rows())
        weights = {"a": np.arange(1.0, 13.0)[mine], "b": np.arange(12.0, 0.0, -1.0)[mine]}
        both = build()
        # The metrics of an output are given by its layer's name up to Keras 3.10, by its key in the dictionary since.
        one = keras.layers.Activation("linear", name="a")(both.layers[-1].output)
        other = keras.layers.Dense(2, name="b", kernel_initializer="ones")(both.layers[0].output)
        outputs = {"a": one, "b": other}
        model = keras.Model(both.inputs, outputs)
        root = keras.metrics.RootMeanSquaredError(name="root")
        metrics = {"metrics": {"a": ["mae", root], "b": "mae"}, "weighted_metrics": {"b": "mae"}}
        model.compile(optimizer, {"a": "mse", "b": "mae"}, **metrics)
        settings: dict[str, Any] = {"batch_size": 12, "verbose": 0, "callbacks": callbacks}
        values = {"a": targets, "b": -targets}
        held = (inputs[::2], {name: each[::2] for name, each in values.items()})
        model.fit(inputs, values, sample_weight=weights, validation_data=held, **settings)
        return {name: value[0] for name, value in model.history.history.items()}

    want = fitted(keras.optimizers.SGD(0.0), slice(12))
    mine = slice(0, 8) if rank == 0 else slice(8, 12)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    got = fitted(optimizer, mine, hvd.callbacks.MetricAverageCallback())
    assert got.keys() == want.keys() and {"a_root", "b_weighted_mae", "a_loss", "val_a_root"} <= got.keys(), got
    for name, value in want.items():
        assert_same(got[name], value)


def check_warm_up(rank: int, size: int) -> None:
    """Warm-up equals a simulation of momentum SGD with the momentum corrected for one step when the rate changes."""
    inputs, targets = rows()
    weights, velocity = np.zeros((5, 2)), np.zeros((5, 2))
    rate, rates, epochs, warm = 0.4, [], 4, 2
    before = rate
    for epoch in range(epochs):
        for step in range(STEPS):
            ahead = epoch + (step + 1) / STEPS
            now = rate * (ahead * (size - 1) / warm + 1) / size if epoch < warm else rate
            if epoch >= 3:
                now = rate * 0.1
            part = slice(step * ROWS, (step + 1) * ROWS)
            gradient = inputs[part].T @ (inputs[part] @ weights - targets[part]) * 2 / (ROWS * 2)
            velocity = 0.9 * (now / before) * velocity - now * gradient
            weights, before = weights + velocity, now
            rates.append(now)

    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, use_bias=False)])
    model.set_weights([np.zeros((5, 2))])
    seen: list[float] = []
    note: Any = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: seen.append(float(note.model.optimizer.learning_rate))
    )
    callbacks = [
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=warm),
        hvd.callbacks.LearningRateScheduleCallback(initial_lr=rate, multiplier=0.1, start_epoch=3),
        note,
    ]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))
    fit(model, optimizer, rank, size, epochs=epochs, callbacks=callbacks)
    assert_same(seen, rates)
    assert_same(values(model), weights.ravel(), 1e-4)
    assert_same(model.history.history["lr"], rates[STEPS - 1 :: STEPS])


def check_warm_up_with_several_steps_per_execution(rank: int, size: int) -> None:
    """`fit` then calls the hook of batches only for the first batch of each execution."""
    model, logs = build(), dict[str, Any]()
    model.compile(optimizer=keras.optimizers.SGD(0.4, momentum=0.9), loss="mse")
    callback = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=2)
    callback.set_model(model)
    callback.set_params({"steps": 4})
    callback.on_train_begin()
    for epoch in range(2):
        callback.on_epoch_begin(epoch)
        callback.on_train_batch_begin(0)
        callback.on_epoch_end(epoch, logs)
    assert_same([float(model.optimizer.learning_rate), logs["lr"]], [0.4, 0.4])


def check_momentum_that_holds_no_rate(rank: int, size: int) -> None:
    """Muon adds up gradients, which a new rate does not change."""
    if not hasattr(keras.optimizers, "Muon"):
        return  # of Keras 2
    model = build()
    optimizer = keras.optimizers.Muon(0.4)
    model.compile(optimizer=optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    if not hasattr(optimizer, "momentums"):
        return  # Keras 3.10 names them otherwise
    for momentum in optimizer.momentums:
        momentum.assign(keras.ops.ones(momentum.shape))
    callback = hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5)
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_train_batch_begin(0)
    assert_same(float(optimizer.learning_rate), 0.2)
    assert all((keras.ops.convert_to_numpy(momentum) == 1).all() for momentum in optimizer.momentums)


def check_schedules_that_cannot_be(rank: int, size: int) -> None:
    nothing: Any = None
    scheduled = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))
    cases: list[tuple[Any, str, Any]] = [
        (lambda: hvd.callbacks.LearningRateScheduleCallback(nothing, 1.0), "initial_lr", None),
        (lambda: hvd.callbacks.LearningRateScheduleCallback(0.1, 1.0), "schedule of its own", scheduled),
        (lambda: hvd.callbacks.BestModelCheckpoint(), "filepath", keras.optimizers.SGD(0.1)),
    ]
    for make, text, optimizer in cases:
        assert_refused(ValueError, text, lambda make=make, each=optimizer: fit(build(), each, callbacks=[make()]))


def check_the_best_model_is_kept(rank: int, size: int, folder: Path) -> None:
    callbacks: list[Any] = [hvd.callbacks.MetricAverageCallback()]
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    best.filepath = str(folder / "best.keras")
    callbacks += [best] if rank == 0 else []
    model = fit(build(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), rank, size, callbacks=callbacks)
    if rank == 0:
        assert best.best == min(model.history.history["loss"])
        assert (folder / "best.keras").exists()
