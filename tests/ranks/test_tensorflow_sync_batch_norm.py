"""Batch normalization on several ranks is that of one process with all their rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farandole.core.context import Context
from helpers.ranks import run_ranks

tf = pytest.importorskip("tensorflow")

import farandole.tensorflow as hvd  # noqa: E402  # after the module that it needs is known to be there
from helpers.tensorflow_training import Array, as_arrays  # noqa: E402

ROWS = 9
EVEN, UNEVEN, EMPTY = (0, 3, 6, 9), (0, 1, 4, 9), (0, 5, 5, 9)


def data(shape: tuple[int, ...], dtype: str, mean: float = 5.0) -> tuple[Array, Array, Array]:
    random = np.random.default_rng(len(shape))
    scale = np.arange(1, shape[-1] + 1)
    inputs = random.normal(size=(ROWS, *shape)) * scale + mean
    mask = random.random((ROWS, *shape[:-1])) < 0.7
    return inputs.astype(dtype), random.normal(size=inputs.shape), mask


def run(layer: Any, inputs: Array, weights: Array, mask: Array | None = None, compiled: bool = False) -> list[Array]:
    """Outputs, gradients by inputs and parameters of a weighted sum, and moving statistics, of a step."""
    layer.build(inputs.shape)
    layer.gamma.assign(np.linspace(0.5, 2.0, layer.gamma.shape[0]))

    def step(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=True, mask=mask)
            loss = tf.reduce_sum(tf.cast(outputs, tf.float64) * weights)
        return [outputs, *tape.gradient(loss, [inputs, layer.gamma, layer.beta])]

    got = (tf.function(step) if compiled else step)(tf.constant(inputs))
    return as_arrays([*got, layer.moving_mean, layer.moving_variance])


def check(
    shape: tuple[int, ...] = (4, 3),
    cuts: tuple[int, ...] = UNEVEN,
    dtype: str = "float64",
    rtol: float = 1e-9,
    masked: bool = False,
    mean: float = 5.0,
    compiled: bool = False,
    **options: Any,
) -> None:
    inputs, weights, mask = data(shape, dtype, mean)

    def body(context: Context) -> list[Array]:
        mine = slice(cuts[context.rank], cuts[context.rank + 1])
        layer = hvd.SyncBatchNormalization(dtype=dtype, **options)
        return run(layer, inputs[mine], weights[mine], mask[mine] if masked else None, compiled)

    alone = tf.keras.layers.BatchNormalization(dtype="float64", **options)
    want = run(alone, inputs.astype("float64"), weights, mask if masked else None)
    got = run_ranks(3, body)
    for place in (0, 1):  # each rank has its rows
        joined = np.concatenate([mine[place] for mine in got])
        np.testing.assert_allclose(joined, want[place], rtol=rtol, atol=rtol)
    for place in (2, 3):  # parameters' gradients add up
        np.testing.assert_allclose(sum(mine[place] for mine in got), want[place], rtol=rtol, atol=10 * rtol)
    for place in (4, 5):
        for mine in got:
            np.testing.assert_array_equal(mine[place], got[0][place])
            np.testing.assert_allclose(mine[place], want[place], rtol=rtol)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("cuts", [EVEN, UNEVEN, EMPTY], ids=["even", "uneven", "empty"])
def test_one_batch(cuts: tuple[int, ...], compiled: bool) -> None:
    check(cuts=cuts, compiled=compiled)


@pytest.mark.parametrize(
    ("shape", "options"),
    [((3,), {}), ((2, 3, 4), {}), ((2, 3, 4), {"axis": 1}), ((4, 3), {"momentum": 0.5, "epsilon": 0.1})],
    ids=["rows", "images", "channels first", "options"],
)
def test_shapes_and_options(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    check(shape, **options)


def test_masks() -> None:
    # Keras adds a ten-millionth to the number of values.
    check(masked=True, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "mean", "rtol"), [("float32", 5.0, 1e-4), ("float32", 1000.0, 1e-2), ("float16", 5.0, 2e-2)]
)
def test_narrow_floats(dtype: str, mean: float, rtol: float) -> None:
    check(dtype=dtype, mean=mean, rtol=rtol)


def test_several_layers_in_one_function() -> None:
    """Trained with the ranks' gradients, a network with two of them is that of one process."""
    inputs, targets, _ = data((3,), "float64")

    def train(kind: type[Any], wrap: Any, rows: slice) -> list[Array]:
        model = tf.keras.Sequential(
            [
                kind(dtype="float64"),
                tf.keras.layers.Dense(3, "tanh", kernel_initializer="ones", dtype="float64"),
                kind(dtype="float64"),
            ]
        )
        model.build((None, 3))

        def step(inputs: Any, targets: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(inputs, training=True) - targets) ** 2)
            gradients = wrap(tape).gradient(loss, model.trainable_variables)
            for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
                variable.assign_sub(0.1 * gradient)

        compiled = tf.function(step)
        for _ in range(3):
            compiled(tf.constant(inputs[rows]), tf.constant(targets[rows]))
        return as_arrays(model.variables)

    def body(context: Context) -> list[Array]:
        return train(
            hvd.SyncBatchNormalization, hvd.DistributedGradientTape, slice(3 * context.rank, 3 * context.rank + 3)
        )

    want = train(tf.keras.layers.BatchNormalization, lambda tape: tape, slice(None))
    for got in run_ranks(3, body):
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-9)


def test_who_is_alone_has_an_ordinary_layer() -> None:
    inputs, weights, _ = data((3,), "float64")
    want = run(tf.keras.layers.BatchNormalization(dtype="float64"), inputs, weights)

    def body(context: Context) -> list[Array]:
        others = hvd.add_process_set([1, 2])
        alone = run(hvd.SyncBatchNormalization(dtype="float64", process_set=others), inputs, weights)
        if context.rank == 0:
            return alone
        layer = hvd.SyncBatchNormalization(dtype="float64")
        layer.build(inputs.shape)
        # Nobody else takes part: what is learnt is used, not the batch.
        np.testing.assert_allclose(layer(inputs, training=False), inputs / np.sqrt(1 + 1e-3), rtol=1e-9)
        return want

    for got in run_ranks(3, body):
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9)


def test_a_saved_layer_keeps_its_process_set(tmp_path: Path) -> None:
    def body(context: Context) -> None:
        pair = hvd.add_process_set([0, 1])
        for process_set in (pair, hvd.global_process_set):
            layer = hvd.SyncBatchNormalization(process_set=process_set)
            assert hvd.SyncBatchNormalization.from_config(layer.get_config()).process_set is process_set
        path = tmp_path / f"{context.rank}.keras"
        tf.keras.Sequential([tf.keras.layers.Input((2,)), hvd.SyncBatchNormalization(process_set=pair)]).save(path)
        loaded = tf.keras.models.load_model(path, custom_objects={"SyncBatchNormalization": hvd.SyncBatchNormalization})
        assert loaded.layers[-1].process_set is pair

    run_ranks(3, body)
    config = hvd.SyncBatchNormalization(process_set=hvd.ProcessSet([1, 0])).get_config()
    assert config["process_set"] == [0, 1]
    unknown = hvd.SyncBatchNormalization.from_config(config)  # to predict, no rank is needed
    assert unknown.process_set.ranks == [0, 1] and unknown.process_set.process_set_id is None


@pytest.mark.parametrize("fused", [True, None])
def test_no_fused_kernel(fused: bool | None) -> None:
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=fused)
