"""Training with DistributedGradientTape on several ranks is training on all their rows at once."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from farandole.config import Config
from farandole.core.context import Context
from helpers.ranks import run_ranks

tf = pytest.importorskip("tensorflow")

import farandole.tensorflow as hvd  # noqa: E402  # after the module that it needs is known to be there
from helpers.tensorflow_training import Array, Model, as_arrays, rows  # noqa: E402

STEPS = 3
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.5),
    "momentum": lambda: tf.keras.optimizers.SGD(0.3, momentum=0.9),
    "adam": lambda: tf.keras.optimizers.Adam(0.1),
}


def train(
    optimizer: Any, wrap: Callable[[Model, Any], Any], rank: int = 0, size: int = 1, compiled: bool = False
) -> list[Array]:
    model = Model()
    optimizer.build(model.variables)

    def step(ids: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(ids, targets)
        gradients = wrap(model, tape).gradient(loss, model.variables)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    run = tf.function(step, reduce_retracing=True) if compiled else step
    for number in range(STEPS):
        run(*(tf.constant(each) for each in rows(number, rank, size)))
    return as_arrays(model.variables)


def plain(model: Model, tape: Any) -> Any:
    return tape


def check(
    size: int,
    compiled: bool,
    optimizer: Callable[[], Any] = OPTIMIZERS["sgd"],
    rtol: float = 1e-9,
    **options: Any,
) -> None:
    """Train on `size` ranks, and on one with all rows; both have to end alike.

    A list as `groups` is how many variables the only group has."""

    def body(context: Context) -> list[Array]:
        def wrap(model: Model, tape: Any) -> Any:
            groups = options.get("groups")
            given = {"groups": [model.variables[: groups[0]]]} if isinstance(groups, list) else {}
            return hvd.DistributedGradientTape(tape, **(options | given))

        return train(optimizer(), wrap, context.rank, size, compiled)

    want = train(optimizer(), plain)
    assert not np.allclose(want[0], as_arrays(Model().variables)[0])
    for got in run_ranks(size, body):
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 3])
def test_training(size: int, name: str, compiled: bool) -> None:
    # Keras computes some of it in float32.
    check(size, compiled, OPTIMIZERS[name], rtol=1e-9 if name == "sgd" else 1e-5)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize(
    ("options", "rtol"),
    [
        ({"sparse_as_dense": True}, 1e-9),
        ({"gradient_predivide_factor": 2.0}, 1e-9),
        ({"groups": 2, "sparse_as_dense": True}, 1e-9),
        ({"groups": [2]}, 1e-9),
        ({"compression": hvd.Compression.fp16}, 1e-2),
    ],
    ids=["sparse as dense", "predivide", "groups", "lists of groups", "fp16"],
)
def test_options(options: dict[str, Any], rtol: float, compiled: bool) -> None:
    check(2, compiled, rtol=rtol, **options)


def test_a_sum_is_a_sum() -> None:
    def body(context: Context) -> list[Array]:
        model = Model()
        with tf.GradientTape() as tape:
            loss = model.loss(*rows(1, context.rank, 2))
        return as_arrays(hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, model.variables))

    model = Model()
    with tf.GradientTape() as tape:
        loss = model.loss(*rows(1))
    want = as_arrays(tape.gradient(loss, model.variables))
    for got in run_ranks(2, body):
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, 2 * theirs, rtol=1e-9)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_the_structure_of_the_sources_is_kept(compiled: bool) -> None:
    def body(context: Context) -> Any:
        x, y, z = (tf.Variable([value, value]) for value in (1.0, 2.0, 3.0))

        def differentiate() -> Any:
            with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
                watched = tf.constant(4.0)
                tape.watch(watched)
                loss = (context.rank + 1) * (tf.reduce_sum(x * x) * watched + tf.reduce_sum(y))
            first = tape.gradient(loss, {"x": x, "rest": (y, [z])})
            # Once more: the tape is persistent. Again for a source that is given twice.
            second = tape.gradient(loss, [x, x, watched], use_generic_names=True)
            weighted = tape.gradient([y], [y], output_gradients=[tf.constant([1.0, 2.0]) * (context.rank + 1)])
            third = tape.gradient(loss, z, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            return first, second, weighted, third

        return tf.nest.map_structure(
            lambda each: None if each is None else each.numpy().tolist(),
            (tf.function(differentiate) if compiled else differentiate)(),
        )

    for got in run_ranks(2, body):
        first, second, weighted, third = got
        assert first == {"x": [12.0, 12.0], "rest": ([1.5, 1.5], [None])}
        assert second == [[12.0, 12.0], [12.0, 12.0], 3.0]
        assert weighted == [[1.5, 3.0]]
        assert third == [0.0, 0.0]


def test_a_tape_wrapped_within_its_block() -> None:
    def body(context: Context) -> float:
        x = tf.Variable(3.0)
        with tf.GradientTape() as tape:
            loss = x * x * (context.rank + 1)
            gradient = hvd.DistributedGradientTape(tape).gradient(loss, x)
        return float(gradient)

    assert run_ranks(2, body) == [9.0, 9.0]


class Watchful(tf.GradientTape):  # type: ignore[misc]
    """A user's own tape."""


def test_the_class_of_a_tape_is_kept() -> None:
    def body(context: Context) -> list[bool]:
        return [isinstance(hvd.DistributedGradientTape(kind()), kind) for kind in (tf.GradientTape, Watchful)]

    assert run_ranks(1, body) == [[True, True]]


def test_jacobians_are_the_ranks_own() -> None:
    def body(context: Context) -> tuple[list[Any], list[Any]]:
        x = tf.constant([[1.0, 2.0]]) * (context.rank + 1)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = x * x
        tape = hvd.DistributedGradientTape(tape)
        return tape.jacobian(y, x).numpy().ravel().tolist(), tape.batch_jacobian(y, x).numpy().ravel().tolist()

    for rank, got in enumerate(run_ranks(2, body)):
        want = [2.0 * (rank + 1), 0.0, 0.0, 4.0 * (rank + 1)]
        assert got == (want, want)


def test_second_derivatives_are_reduced() -> None:
    """The mean over ranks of 3x², differentiated again."""

    def body(context: Context) -> float:
        x = tf.Variable(2.0)
        with hvd.DistributedGradientTape(tf.GradientTape()) as outer:
            with tf.GradientTape() as inner:
                y = x**3 * (context.rank + 1)
            slope = hvd.DistributedGradientTape(inner).gradient(y, x)
        return float(outer.gradient(slope, x))

    assert run_ranks(2, body) == [18.0, 18.0]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("scale", [True, False], ids=["scaled", "unscaled"])
def test_local_sources(scale: bool, compiled: bool) -> None:
    def body(context: Context) -> tuple[list[Array], list[Array], list[Array]]:
        model, ids = Model(), rows(1, context.rank, 2)

        def differentiate() -> Any:
            with tf.GradientTape(persistent=True) as tape:
                loss = model.loss(*ids)
            tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
            tape.register_local_source(model.variables[0])
            tape.register_local_source(model.variables[2])
            local, shared = tape.get_local_and_global_gradients(loss, model.variables)
            assert [source for source, _ in local] == [model.variables[0], model.variables[2]]
            assert [source for source, _ in shared] == [model.variables[1]]
            return tape.gradient(loss, model.variables), [each for _, each in local], [each for _, each in shared]

        gradients, local, shared = (tf.function(differentiate) if compiled else differentiate)()
        return as_arrays(gradients), as_arrays(local), as_arrays(shared)

    def alone(rank: int, size: int) -> list[Array]:
        model = Model()
        with tf.GradientTape() as tape:
            loss = model.loss(*rows(1, rank, size))
        return as_arrays(tape.gradient(loss, model.variables))

    for rank, (gradients, local, shared) in enumerate(run_ranks(2, body)):
        table, _, bias = (each / (2 if scale else 1) for each in alone(rank, 2))
        kernel = alone(0, 1)[1]
        for got, want in zip([*gradients, *local, *shared], [table, kernel, bias, table, bias, kernel], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_an_infinity_of_a_local_source_is_seen_on_all_ranks(sparse: bool, compiled: bool) -> None:
    def body(context: Context) -> list[bool]:
        mine, ours = tf.Variable([1.0]), tf.Variable([[1.0], [1.0]])

        def differentiate(factor: Any) -> Any:
            with tf.GradientTape() as tape:
                read = tf.gather(ours, [0]) if sparse else ours
                loss = tf.reduce_sum(mine) * factor + tf.reduce_sum(read)
            tape = hvd.DistributedGradientTape(tape)
            tape.register_local_source(mine)
            return [tf.convert_to_tensor(each) for each in tape.gradient(loss, [mine, ours])]

        run = tf.function(differentiate) if compiled else differentiate
        steps = [run(tf.constant(factor)) for factor in (float("inf") if context.rank else 1.0, 1.0)]
        return [all(np.isfinite(each.numpy()).all() for each in gradients) for gradients in steps]

    assert run_ranks(2, body) == [[False, True]] * 2


def test_local_layers() -> None:
    def body(context: Context) -> list[list[float]]:
        mine, ours = (tf.keras.layers.Dense(1, kernel_initializer="ones") for _ in range(2))
        # Built within the block.
        with hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=mine) as tape:
            loss = tf.reduce_sum(ours(mine(tf.constant([[1.0 + 2 * context.rank]]))))
        sources = [*mine.trainable_weights, *ours.trainable_weights]
        return [each.numpy().ravel().tolist() for each in tape.gradient(loss, sources)]

    for rank, got in enumerate(run_ranks(2, body)):
        assert got == [[(1.0 + 2 * rank) / 2], [0.5], [2.0], [1.0]]


def test_members_of_a_process_set_reduce_among_themselves() -> None:
    def body(context: Context) -> float:
        pair = hvd.add_process_set([0, 2])
        x = tf.Variable(1.0)
        with tf.GradientTape() as tape:
            loss = x * float(10**context.rank)
        return float(hvd.DistributedGradientTape(tape, process_set=pair).gradient(loss, x))

    assert run_ranks(3, body) == [50.5, 10.0, 50.5]


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_different_variables_are_not_mixed(compiled: bool) -> None:
    both = threading.Barrier(2)  # whose time is up first must not end before the other's is

    def body(context: Context) -> None:
        a, b, c = (tf.Variable(1.0) for _ in range(3))

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = a + (b if context.rank == 0 else c)
            return hvd.DistributedGradientTape(tape, groups=1).gradient(loss, [a, b, c])

        with pytest.raises(tf.errors.DeadlineExceededError, match=rf"without\.{2 - context.rank}"):
            (tf.function(step) if compiled else step)()
        both.wait(60)

    run_ranks(2, body, config=Config(collective_timeout=timedelta(seconds=1)))


def test_several_tables_are_one_request() -> None:
    def body(context: Context) -> tuple[float, list[Array]]:
        tables = [tf.Variable(tf.zeros([4, 2], dtype)) for dtype in (tf.float32, tf.float64)]
        rows = [context.rank, 3]
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.cast(tf.gather(table, rows), tf.float32)) for table in tables])
        before = hvd.metrics()["agreed_in_full"]
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, tables)
        assert all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
        return hvd.metrics()["agreed_in_full"] - before, as_arrays(gradients)

    for asked, gradients in run_ranks(2, body):
        assert asked == 4  # members of one group: the rows, and where they belong
        for gradient in gradients:
            np.testing.assert_array_equal(gradient, [[0.5, 0.5], [0.5, 0.5], [0, 0], [1, 1]])


def test_the_gradients_of_a_step_are_one_transfer() -> None:
    def body(context: Context) -> tuple[float, float]:
        variables = [tf.Variable(tf.ones([8])) for _ in range(30)]
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable * variable) for variable in variables])
        before = hvd.metrics()
        hvd.DistributedGradientTape(tape).gradient(loss, variables)
        after = hvd.metrics()
        return after["operations"] - before["operations"], after["buckets"] - before["buckets"]

    assert run_ranks(2, body) == [(30, 1), (30, 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"op": 17}, "op must be one of"),
        ({"groups": 0}, "groups should be a positive integer"),
    ],
    ids=["predivide", "op", "groups"],
)
def test_settings_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    def body(context: Context) -> None:
        with pytest.raises(ValueError, match=message):
            hvd.DistributedGradientTape(tf.GradientTape(), **options)
        with pytest.raises(ValueError, match="Layer"):
            hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])
        with pytest.warns(DeprecationWarning, match="num_groups") as warned:
            hvd.DistributedGradientTape(tf.GradientTape(), num_groups=2)
        assert warned[0].filename == __file__

    run_ranks(1, body)
