"""Training with DistributedOptimizer and the optimizers of tf.compat.v1, in graphs, functions and eager mode."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farandole.core.context import Context
from helpers.ranks import run_ranks

tf = pytest.importorskip("tensorflow")

import farandole.tensorflow as hvd  # noqa: E402  # after the module that it needs is known to be there
from farandole.tensorflow.aggregation import Aggregation  # noqa: E402
from helpers.tensorflow_training import Array, Model, as_arrays, rows  # noqa: E402

v1 = tf.compat.v1
STEPS = 3
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.5),
    "momentum": lambda: v1.train.MomentumOptimizer(0.25, 0.875),
    "adam": lambda: v1.train.AdamOptimizer(0.1),
}
Wrap = Callable[..., Any]


def plain(optimizer: Any, model: Model) -> Any:
    return optimizer


def train_graph(
    name: str, wrap: Wrap, rank: int = 0, size: int = 1, passes: int = 1, resource: bool = True
) -> tuple[list[Array], int]:
    """Train in a session; with `passes`, each step in that many parts. Returns the variables and the global step."""
    with tf.Graph().as_default():
        model = Model(partial(v1.Variable, use_resource=resource))
        ids, targets = v1.placeholder(tf.int64, [None, 2]), v1.placeholder(tf.float64, [None, 2])
        counted = v1.train.get_or_create_global_step()
        optimizer = wrap(OPTIMIZERS[name](), model)
        train = optimizer.minimize(model.loss(ids, targets), global_step=counted, var_list=model.variables)
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            for step in range(STEPS):
                for part in range(passes):
                    given = rows(step, rank * passes + part, size * passes)
                    session.run(train, dict(zip((ids, targets), given, strict=True)))
            return as_arrays(session.run(model.variables)), int(session.run(counted))


def train_eagerly(
    name: str, wrap: Wrap, rank: int = 0, size: int = 1, passes: int = 1, compiled: bool = False
) -> tuple[list[Array], int]:
    model, counted = Model(), tf.Variable(0, dtype=tf.int64)
    optimizer = wrap(OPTIMIZERS[name](), model)

    def step(ids: Any, targets: Any) -> None:
        pairs = optimizer.compute_gradients(lambda: model.loss(ids, targets), model.variables)
        optimizer.apply_gradients(pairs, global_step=counted)

    run = tf.function(step) if compiled else step
    for number in range(STEPS):
        for part in range(passes):
            run(*(tf.constant(each) for each in rows(number, rank * passes + part, size * passes)))
    return as_arrays(model.variables), int(counted)


def train_function(*args: Any, **kwargs: Any) -> tuple[list[Array], int]:
    return train_eagerly(*args, **kwargs, compiled=True)


MODES = {"graph": train_graph, "eager": train_eagerly, "function": train_function}
modes = pytest.mark.parametrize("mode", MODES)


def check(size: int, mode: str, kind: str = "momentum", passes: int = 1, **options: Any) -> None:
    """Train on `size` ranks, in `passes` parts each, and on one with all rows; both have to end alike."""
    want, steps = train_graph(kind, plain)
    assert steps == STEPS

    def body(context: Context) -> tuple[list[Array], int]:
        def wrap(optimizer: Any, model: Model) -> Any:
            return hvd.DistributedOptimizer(optimizer, **options)

        return MODES[mode](kind, wrap, context.rank, size, passes)

    for got, steps in run_ranks(size, body):
        assert steps == STEPS * passes
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)


@modes
@pytest.mark.parametrize(("size", "name"), [(2, "sgd"), (2, "adam"), (3, "momentum")])
def test_training(size: int, name: str, mode: str) -> None:
    check(size, mode, name)


@modes
def test_passes_add_up(mode: str) -> None:
    check(
        2, mode, passes=3, backward_passes_per_step=3, average_aggregated_gradients=True, sparse_as_dense=True, groups=1
    )


def test_passes_add_up_to_a_sum() -> None:
    def body(context: Context) -> tuple[float, list[float]]:
        x = tf.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2)
        seen = []
        for factor in (1.0, 2.0, 3.0, 4.0):
            optimizer.minimize(lambda factor=factor: factor * x * (context.rank + 1), var_list=[x])
            seen.append(float(x))
        return optimizer.get_name(), seen

    for name, seen in run_ranks(2, body):
        assert name == "GradientDescent"
        assert seen == [0.0, -4.5, -4.5, -15.0]


def test_sparse_gradients_do_not_add_up() -> None:
    def body(context: Context) -> None:
        model = Model()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), backward_passes_per_step=2)
        with pytest.raises(ValueError, match="sparse_as_dense"):
            optimizer.minimize(lambda: model.loss(*rows(0)), var_list=model.variables)

    run_ranks(1, body)


@pytest.mark.parametrize(
    "options",
    [
        {"sparse_as_dense": True, "groups": 2},
        {"gradient_predivide_factor": 2.0},
        {"use_locking": True, "name": "ours"},
    ],
    ids=["groups", "predivide", "locking"],
)
def test_options(options: dict[str, Any]) -> None:
    check(2, "graph", **options)


def test_reference_variables() -> None:
    want, _ = train_graph("momentum", plain)

    def body(context: Context) -> list[Array]:
        def wrap(optimizer: Any, model: Model) -> Any:
            return hvd.DistributedOptimizer(optimizer)

        return train_graph("momentum", wrap, context.rank, 2, resource=False)[0]

    for got in run_ranks(2, body):
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9)


def test_slots_and_checkpoints_are_those_of_the_plain_optimizer(tmp_path: Path) -> None:
    def graph(wrap: Wrap) -> tuple[list[str], list[str]]:
        with tf.Graph().as_default():
            model = Model(partial(v1.Variable, use_resource=True))
            optimizer = wrap(v1.train.AdamOptimizer(0.1))
            optimizer.minimize(model.loss(*rows(0)), var_list=model.variables)
            slot = optimizer.get_slot(model.variables[1], "m")
            assert slot is not None and slot.shape == (3, 2)
            assert isinstance(optimizer, v1.train.AdamOptimizer)
            return optimizer.get_slot_names(), sorted(each.name for each in v1.global_variables())

    def body(context: Context) -> Any:
        return graph(partial(hvd.DistributedOptimizer, backward_passes_per_step=2, sparse_as_dense=True))

    assert run_ranks(1, body) == [graph(lambda optimizer: optimizer)]


def adasum(one: Array, two: Array) -> Array:
    """The rule of Maleki et al. for two."""
    dot = float(np.vdot(one, two))
    return (1 - dot / (2 * float(np.vdot(one, one)))) * one + (1 - dot / (2 * float(np.vdot(two, two)))) * two


@modes
@pytest.mark.parametrize("passes", [1, 2])
def test_adasum_combines_steps(mode: str, passes: int) -> None:
    """What two ranks have made of their own gradients, with momentum, from the same start each time."""

    def body(context: Context) -> list[Array]:
        def wrap(optimizer: Any, model: Model) -> Any:
            return hvd.DistributedOptimizer(
                optimizer,
                op=hvd.Adasum,
                sparse_as_dense=True,
                backward_passes_per_step=passes,
                average_aggregated_gradients=True,
            )

        return MODES[mode]("momentum", wrap, context.rank, 2, passes)[0]

    values = as_arrays(Model().variables)
    momenta = [[np.zeros_like(value) for value in values] for _ in range(2)]
    for step in range(STEPS):
        for rank in range(2):
            model = Model()
            for variable, value in zip(model.variables, values, strict=True):
                variable.assign(value)
            with tf.GradientTape() as tape:
                loss = model.loss(*rows(step, rank, 2))
            gradients = as_arrays(tape.gradient(loss, model.variables))
            momenta[rank] = [0.875 * held + new for held, new in zip(momenta[rank], gradients, strict=True)]
        values = [
            value + adasum(-0.25 * one, -0.25 * two)
            for value, one, two in zip(values, momenta[0], momenta[1], strict=True)
        ]
    for got in run_ranks(2, body):
        for mine, theirs in zip(got, values, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9)


def test_local_variables_of_the_model() -> None:
    def body(context: Context) -> list[float]:
        x, y = tf.Variable(0.0), tf.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        optimizer.register_local_var(y)
        optimizer.minimize(lambda: (x + y) * (context.rank + 1), var_list=[x, y])
        return [float(x), float(y)]

    assert run_ranks(2, body) == [[-1.5, -0.5], [-1.5, -1.0]]


def test_members_of_a_process_set_step_together() -> None:
    def body(context: Context) -> float:
        pair = hvd.add_process_set([1, 2])
        x = tf.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), process_set=pair)
        optimizer.minimize(lambda: x * (context.rank + 1), var_list=[x])
        return float(x)

    assert run_ranks(3, body) == [-1.0, -2.5, -2.5]


def test_an_overflow_on_one_rank_skips_the_step_of_all() -> None:
    """Half floats below a loss scale; the infinity does not stay in the sums."""

    def body(context: Context) -> list[tuple[float, float]]:
        with tf.Graph().as_default():
            x, factor = v1.Variable(1.0, use_resource=True), v1.placeholder(tf.float16, [])
            scaler = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(
                v1.train.GradientDescentOptimizer(0.125), v1.mixed_precision.DynamicLossScale(8.0)
            )
            optimizer = hvd.DistributedOptimizer(scaler, backward_passes_per_step=2)
            train = optimizer.minimize(tf.cast(x, tf.float16) * factor, var_list=[x])
            scale = scaler._loss_scale()
            seen = []
            with v1.Session() as session:
                session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
                for infinite in (False, True, False):
                    for _ in range(2):
                        session.run(train, {factor: np.inf if infinite and context.rank == 1 else context.rank + 1})
                    seen.append(tuple(float(each) for each in session.run((x, scale))))
            return seen

    # Steps by an eighth of twice the mean of one and two.
    assert run_ranks(2, body) == [[(0.625, 8.0), (0.625, 4.0), (0.25, 4.0)]] * 2


def session_program(rank: int, size: int, folder: Path | None, steps: int) -> list[Array]:
    """What a user's program does: different values at first, a hook, checkpoints on rank 0 alone."""
    with tf.Graph().as_default():
        model = Model(partial(v1.Variable, use_resource=True), seed=rank)
        counted = v1.train.get_or_create_global_step()
        numbers = v1.placeholder(tf.int64, [None, 2]), v1.placeholder(tf.float64, [None, 2])
        optimizer = (
            hvd.DistributedOptimizer(v1.train.MomentumOptimizer(0.25, 0.875)) if size else OPTIMIZERS["momentum"]()
        )
        train = optimizer.minimize(model.loss(*numbers), global_step=counted)
        with tf.control_dependencies([train]):
            after = [variable.read_value() for variable in model.variables]
        hooks = [v1.train.StopAtStepHook(last_step=steps)]
        hooks += [hvd.BroadcastGlobalVariablesHook(0)] if size else []
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(folder) if folder is not None else None, hooks=hooks, log_step_count_steps=None
        ) as session:
            values: list[Any] = []
            while not session.should_stop():
                step = session.run_step_fn(lambda step_context: step_context.session.run(counted))
                given = rows(int(step), rank, size or 1)
                values = session.run(after, dict(zip(numbers, given, strict=True)))
            return as_arrays(values)


@pytest.fixture
def no_writers() -> Iterator[None]:
    """The writer of event files, one per folder, lives in TensorFlow's cache, and has a thread."""
    yield
    v1.summary.FileWriterCache.clear()


@pytest.mark.usefixtures("no_writers")
def test_a_monitored_session_and_its_checkpoint(tmp_path: Path) -> None:
    def body(context: Context, steps: int) -> list[Array]:
        return session_program(context.rank, 2, tmp_path if context.rank == 0 else None, steps)

    for steps in (2, 4):  # the second goes on where the first has ended, with what rank 0 has saved
        want = session_program(0, 0, None, steps)
        for got in run_ranks(2, body, steps):
            for mine, theirs in zip(got, want, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-9)


def test_an_optimizer_of_keras() -> None:
    def body(context: Context) -> list[float]:
        x, y = tf.Variable(0.0), tf.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), op=hvd.Sum, groups=[[x, y]])
        assert isinstance(optimizer, tf.keras.optimizers.SGD)
        optimizer.register_local_var(y)
        optimizer.apply_gradients([(tf.constant(context.rank + 1.0), x), (tf.constant(4.0), y)])
        with pytest.raises(ValueError, match="Average and Sum"):
            hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), op=hvd.Adasum)
        return [float(x), float(y)]

    assert run_ranks(2, body) == [[-3.0, -2.0]] * 2


def test_what_is_no_optimizer() -> None:
    def body(context: Context) -> None:
        with pytest.raises(ValueError, match="got str"):
            hvd.DistributedOptimizer("adam")
        with pytest.raises(ValueError, match="distributed already"):
            hvd.DistributedOptimizer(hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()))
        with pytest.raises(ValueError, match="backward_passes_per_step"):
            hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), backward_passes_per_step=0)
        with pytest.raises(ValueError, match="gradient_predivide_factor"):
            hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), op=hvd.Sum, gradient_predivide_factor=2.0)
        with pytest.warns(DeprecationWarning, match="num_groups") as warned:
            hvd.DistributedOptimizer(OPTIMIZERS["sgd"](), num_groups=2)
        assert warned[0].filename == __file__

    run_ranks(1, body)


def test_programs_reach_the_plain_optimizer() -> None:
    def body(context: Context) -> None:
        plain = v1.train.GradientDescentOptimizer(0.5)
        assert hvd.DistributedOptimizer(plain)._optimizer is plain
        scaler = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(plain, 8.0)
        assert hvd.DistributedOptimizer(scaler)._optimizer is plain, "what an optimizer calls so itself stays"

    run_ranks(1, body)


def test_the_sum_of_a_deleted_variable_is_not_that_of_a_new_one() -> None:
    aggregation = Aggregation(100, average=False)
    for size in range(1, 10):
        # Each variable is deleted before the next one is made, which is often at the same address.
        (total,) = aggregation.add([tf.ones(size)], [tf.Variable(tf.ones(size))], list)
        np.testing.assert_array_equal(total, np.ones(size))


def test_a_gradient_may_be_missing_in_some_passes() -> None:
    def body(context: Context) -> list[list[float | None]]:
        aggregation, variables = Aggregation(passes=2, average=False), [tf.Variable(0.0) for _ in range(3)]
        steps = []
        for first, last in [((1.0, None, None), (None, 2.0, None)), ((None, 3.0, None), (None, 4.0, None))]:
            for values in (first, last):
                gradients = [None if value is None else tf.constant(value) for value in values]
                summed = aggregation.add(gradients, variables, lambda sums: sums)
            steps.append([None if each is None else float(each) for each in summed])
        return steps

    assert run_ranks(1, body) == [[[1.0, 2.0, None], [None, 7.0, None]]]
