"""Checks of a distributed Keras optimizer on two ranks, compared with one process that has all rows."""

import warnings
from typing import Any

import keras
import numpy as np

import farandole.keras as hvd
from helpers.keras_models import EPOCHS, ROWS, STEPS, assert_same, build, fit, rows, values

OPTIMIZERS: dict[str, Any] = {
    "adam, clipped": lambda: keras.optimizers.Adam(0.02, clipnorm=0.05),
    "all clipped, averaged": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, global_clipnorm=0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
    "schedule, decay": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5), weight_decay=0.1
    ),
}


def check_training_equals_one_process(rank: int, size: int) -> None:
    for name, make in OPTIMIZERS.items():
        want = fit(build(), make())
        optimizer = hvd.DistributedOptimizer(make())
        assert isinstance(optimizer, type(make())), name
        got = fit(build(), optimizer, rank, size)
        assert_same(values(got), values(want))
        assert int(optimizer.iterations) == int(want.optimizer.iterations) == EPOCHS * STEPS
        assert float(optimizer.learning_rate) == float(want.optimizer.learning_rate)
        for mine, theirs in zip(optimizer.variables, want.optimizer.variables, strict=True):
            assert_same(keras.ops.convert_to_numpy(mine), keras.ops.convert_to_numpy(theirs))


def check_options(rank: int, size: int) -> None:
    def sgd(rate: float = 0.1) -> Any:
        return keras.optimizers.SGD(rate, momentum=0.9)

    want = values(fit(build(), sgd()))
    # The torch backend has no steps_per_execution.
    several = {} if keras.backend.backend() == "torch" else {"steps_per_execution": 2}
    cases: list[tuple[dict[str, Any], dict[str, Any], float, float]] = [
        ({"op": hvd.Sum, "name": "mine", "sparse_as_dense": True}, {"run_eagerly": True}, 0.05, 2e-5),
        ({"gradient_predivide_factor": 2.0, "groups": 3}, several, 0.1, 2e-5),
        ({"compression": hvd.Compression.fp16}, {}, 0.1, 5e-3),
        ({"compression": hvd.Compression.bf16}, {}, 0.1, 5e-2),
        ({"compression": hvd.Compression.int8}, {}, 0.1, 5e-2),
    ]
    for options, compiled, rate, tolerance in cases:
        got = fit(build(), hvd.DistributedOptimizer(sgd(rate), **options), rank, size, **compiled)
        assert_same(values(got), want, tolerance)
    model = build()
    groups = [model.trainable_variables[:1], model.trainable_variables[2:]]
    assert_same(values(fit(model, hvd.DistributedOptimizer(sgd(), groups=groups), rank, size)), want)


def check_embeddings(rank: int, size: int) -> None:
    """With TensorFlow, gradients of embeddings are slices, reduced apart from dense ones and without factors."""

    def trained(optimizer: Any, rank: int = 0, size: int = 1) -> Any:
        layers = [keras.layers.Embedding(16, 3), keras.layers.Flatten(), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
        random = np.random.default_rng(5)
        model.set_weights([random.normal(size=weight.shape) for weight in model.weights])
        model.compile(optimizer=optimizer, loss="mse")
        inputs, targets = rows(rank, size)
        model.fit((np.abs(inputs) * 5 % 16).astype("int32"), targets, batch_size=ROWS // size, shuffle=False, verbose=0)
        return model

    want = values(trained(keras.optimizers.SGD(0.1)))
    halved: dict[str, Any] = {"gradient_predivide_factor": 2.0}
    for options in ({}, halved, {**halved, "groups": 1}):
        assert_same(values(trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options), rank, size)), want)


def check_a_loop_of_ones_own(rank: int, size: int) -> None:
    """A custom loop may apply gradients, one of them None; a rank outside of the process set trains alone."""
    members = hvd.add_process_set([0])
    for process_set in (hvd.global_process_set, members):
        alone = process_set is members
        variables = [keras.Variable(np.zeros(2, "float32"), name=name) for name in "abc"]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=process_set)
        grads = [keras.ops.ones(2) * (rank + 1), None, keras.ops.ones(2) * rank]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns of the missing gradient
            optimizer.apply(grads, variables)
        want = [-1.0 - rank, 0.0, -1.0 * rank] if alone else [-1.5, 0.0, -0.5]
        assert [float(keras.ops.convert_to_numpy(variable)[0]) for variable in variables] == want
    hvd.remove_process_set(members)


def check_a_variable_that_is_given_twice(rank: int, size: int) -> None:
    """Two models may share a layer, and a loop may pass the variables of both."""
    for groups in (None, 2):
        shared, other = (keras.Variable(np.zeros(2, "float32")) for _ in range(2))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), groups=groups)
        optimizer.build([shared, other])
        grads = [keras.ops.ones(2) * (rank + value) for value in (1, 10, 100)]
        optimizer.apply(grads, [shared, other, shared])
        assert [float(keras.ops.convert_to_numpy(each)[0]) for each in (shared, other)] == [-102.0, -10.5]


def check_passes_are_added_up_before_they_are_exchanged(rank: int, size: int) -> None:
    def sgd(**options: Any) -> Any:
        return keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05, **options)

    # Two passes over half of the rows each equal one pass over all rows.
    want = values(fit(build(), sgd(), batch_size=2 * ROWS))
    ways = [
        hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=2)),
        hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2, average_aggregated_gradients=True),
    ]
    for optimizer in ways:
        before = hvd.metrics()["operations"]
        model = fit(build(), optimizer, rank, size)
        assert_same(values(model), want)
        assert int(optimizer.iterations) == EPOCHS * STEPS // 2
        # One operation per variable and update.
        assert hvd.metrics()["operations"] - before == EPOCHS * STEPS // 2 * len(model.trainable_variables)

    summed = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2)
    want = values(fit(build(), keras.optimizers.SGD(0.1), batch_size=2 * ROWS))
    assert_same(values(fit(build(), summed, rank, size)), want)


def check_passes_go_on_in_the_next_fit(rank: int, size: int) -> None:
    """The sums of an unfinished step stay those of each rank, unless one rank alone has loaded a model."""

    def trained(optimizer: Any, rank: int = 0, size: int = 1, callbacks: Any = ()) -> Any:
        model = build()
        for _ in range(3):
            fit(model, optimizer, rank, size, epochs=1, callbacks=callbacks)
        return values(model)

    def sgd() -> Any:
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)

    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    want = trained(sgd())
    assert_same(trained(hvd.DistributedOptimizer(sgd()), rank, size, [callback]), want)
    model, optimizer = build(), hvd.DistributedOptimizer(sgd())
    optimizer.build(model.trainable_variables)
    optimizer._iterations.assign(1 - rank)
    for held in optimizer._accumulated_gradients:
        held.assign(keras.ops.ones(held.shape) * (1 - rank))
    model.compile(optimizer=optimizer, loss="mse")
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_train_batch_begin(0)
    assert int(optimizer._iterations) == 1
    assert all((keras.ops.convert_to_numpy(held) == 1).all() for held in optimizer._accumulated_gradients)


def check_all_ranks_skip_what_one_cannot_use(rank: int, size: int) -> None:
    inputs, targets = rows(rank, size)
    inputs = inputs.copy()
    inputs[rank * (ROWS // size)] = np.inf  # the first step of rank 0, the second of rank 1
    wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=1024.0)
    optimizer = hvd.DistributedOptimizer(wrapped)
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    model = build()
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(inputs, targets, batch_size=ROWS // size, shuffle=False, verbose=0)
    assert float(optimizer.dynamic_scale) == 256.0
    assert int(optimizer.iterations) == STEPS - 2

    alone, plain = build(), keras.optimizers.SGD(0.1, momentum=0.9)
    alone.compile(optimizer=plain, loss="mse")
    all_inputs, all_targets = rows()
    alone.fit(all_inputs[2 * ROWS :], all_targets[2 * ROWS :], batch_size=ROWS, shuffle=False, verbose=0)
    assert_same(values(model), values(alone))


def check_mixed_precision_as_compile_makes_it(rank: int, size: int) -> None:
    def half() -> Any:
        model = build(dtype="mixed_float16")
        model.dtype_policy = keras.DTypePolicy("mixed_float16")
        return model

    def sgd() -> Any:
        return hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))

    try:
        fit(half(), sgd(), rank, size)
    except RuntimeError as error:
        assert "LossScaleOptimizer" in str(error)
    else:
        raise AssertionError("ranks would have skipped steps of their own")
    got = fit(half(), sgd(), rank, size, callbacks=[hvd.callbacks.MetricAverageCallback()])
    assert isinstance(got.optimizer, keras.optimizers.LossScaleOptimizer)
    assert_same(values(got), values(fit(half(), keras.optimizers.SGD(0.1))), 5e-3)


def check_local_layers(rank: int, size: int) -> None:
    """Gradients of local layers are the rank's own, divided by the number of ranks."""

    def scaled() -> Any:
        return keras.optimizers.LossScaleOptimizer(plain(), initial_scale=1.0)

    def plain() -> Any:
        return keras.optimizers.SGD(1.0)

    # Keras' LossScaleOptimizer cannot be called by hand on JAX.
    other = plain if keras.backend.backend() == "jax" else scaled
    for make, scale, divisor in ((plain, True, 2.0), (other, False, 1.0)):
        model = build()
        optimizer = hvd.PartialDistributedOptimizer(make(), local_layers=model.layers[:1], scale_local_gradients=scale)
        grads = [keras.ops.ones(variable.shape) * (rank + 1) for variable in model.trainable_variables]
        before = model.get_weights()
        optimizer.apply(grads, model.trainable_variables)
        try:
            optimizer.apply(grads[1:], model.trainable_variables)
        except ValueError as error:
            assert "3 gradients" in str(error)
        else:
            raise AssertionError("gradients and variables do not match")
        steps = [float(np.mean(old - new)) for old, new in zip(before, model.get_weights(), strict=True)]
        assert_same(steps, [(rank + 1) / divisor] * 2 + [1.5] * 2)
