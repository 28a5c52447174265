"""Ranks start alike: broadcasts of variables, the hook, and Python objects."""

from typing import Any

import numpy as np
import pytest

from farandole.core.context import Context
from helpers.ranks import run_ranks

tf = pytest.importorskip("tensorflow")

import farandole.tensorflow as hvd  # noqa: E402  # after the module that it needs is known to be there

v1 = tf.compat.v1
DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.int32, tf.int64, tf.uint8, tf.bool]
# The state of Keras' random layers is of uint32.
OTHERS = [tf.uint16, tf.uint32, tf.uint64, tf.int16, tf.complex64, tf.complex128]


def values(rank: int) -> list[Any]:
    numbers = np.arange(6).reshape(2, 3) + 10 * rank
    return [tf.cast(numbers % 2 if dtype == tf.bool else numbers, dtype) for dtype in [*DTYPES, *OTHERS]]


def check(got: list[list[Any]], root: int) -> None:
    for mine in got:
        for value, want in zip(mine, values(root), strict=True):
            np.testing.assert_array_equal(value, want.numpy())


@pytest.mark.parametrize("inplace", [False, True])
def test_variables_of_all_types(inplace: bool) -> None:
    def body(context: Context) -> list[Any]:
        variables = [tf.Variable(value) for value in values(context.rank)]
        assert hvd.broadcast_variables(variables, root_rank=1, inplace=inplace) is None
        return [variable.numpy() for variable in variables]

    check(run_ranks(3, body), root=1)


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_variables_of_a_graph(resource: bool) -> None:
    def body(context: Context) -> list[Any]:
        given = [value.numpy() for value in values(context.rank)]
        with tf.Graph().as_default():
            # TensorFlow has no kernels for reference variables of all types.
            kept = given if resource else given[2:4]
            variables = [v1.Variable(value, use_resource=resource) for value in kept]
            spread = hvd.broadcast_global_variables(0)
            # Once more, in the same graph.
            again = hvd.broadcast_(variables, 0, name="again")
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                session.run(spread)
                got = session.run(variables)
                for one, two in zip(got, session.run(again), strict=True):
                    np.testing.assert_array_equal(one, two)
        return (
            got if resource else [*given[:2], *got, *given[4:]] if context.rank == 0 else [*zero[:2], *got, *zero[4:]]
        )

    zero = [value.numpy() for value in values(0)]
    check(run_ranks(2, body), root=0)


def test_variables_within_a_function() -> None:
    def body(context: Context) -> list[Any]:
        variables = [tf.Variable(value) for value in values(context.rank)]
        tf.function(lambda: hvd.broadcast_variables(variables, 0))()
        return [variable.numpy() for variable in variables]

    check(run_ranks(2, body), root=0)


def test_a_model_of_keras() -> None:
    def body(context: Context) -> list[Any]:
        model = tf.keras.Sequential([tf.keras.layers.Dense(2), tf.keras.layers.Dropout(0.5, seed=context.rank)])
        model.build((None, 3))
        optimizer = tf.keras.optimizers.Adam(0.1 * (context.rank + 1))
        optimizer.build(model.trainable_variables)
        # The layers' values come from one generator for all threads.
        model.layers[0].kernel.assign(np.full((3, 2), context.rank))
        hvd.broadcast_variables([*model.variables, *optimizer.variables], 1)
        assert hvd.broadcast_(model.variables[:1], 0)[0] is not None
        return [np.asarray(variable) for variable in [*model.variables, *optimizer.variables]]

    one, two = run_ranks(2, body)
    assert len(one) == 3 + 6
    for mine, theirs in zip(one, two, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(one[0], np.ones((3, 2)))


def test_members_of_a_process_set() -> None:
    def body(context: Context) -> list[Any]:
        pair = hvd.add_process_set([0, 2])
        variable = tf.Variable(float(context.rank))
        if pair.included():
            hvd.broadcast_variables([variable], 2, process_set=pair)
            assert hvd.broadcast_object(context.rank, 2, process_set=pair) == 2
            assert hvd.allgather_object(context.rank, process_set=pair) == [0, 2]
        return [float(variable)]

    assert run_ranks(3, body) == [[2.0], [1.0], [2.0]]


def test_what_cannot_be_broadcast() -> None:
    def body(context: Context) -> None:
        assert hvd.broadcast_variables([], 0) is None
        with pytest.raises(RuntimeError, match="broadcast_variables"):
            hvd.broadcast_global_variables(0)
        with pytest.raises(tf.errors.InvalidArgumentError, match="root"):
            hvd.broadcast_variables([tf.Variable(1.0)], 5)
        with pytest.raises(ValueError, match=r"'names:0' \(string\)"):
            hvd.broadcast_variables([tf.Variable(["a"], name="names")], 0)
        with tf.Graph().as_default():
            mixed = [v1.Variable(1.0, use_resource=resource) for resource in (True, False)]
            with pytest.raises(ValueError, match="resource variables"):
                hvd.broadcast_(mixed, 0)

    run_ranks(1, body)


def test_variables_that_differ() -> None:
    def body(context: Context) -> str:
        with pytest.raises(tf.errors.FailedPreconditionError) as caught:
            hvd.broadcast_variables([tf.Variable(1.0), tf.Variable(tf.zeros(context.rank + 2))], 0)
        return str(caught.value)

    for text in run_ranks(2, body):
        assert "float32[2]" in text and "float32[3]" in text


def test_the_hook_makes_its_operation_for_each_graph() -> None:
    def body(context: Context) -> list[float]:
        hook, got = hvd.BroadcastGlobalVariablesHook(1, device="/cpu:0"), []
        for number in range(2):
            with tf.Graph().as_default():
                variable = v1.Variable(float(10 * number + context.rank), use_resource=True)
                with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
                    got.append(float(session.run(variable)))
        return got

    assert run_ranks(2, body) == [[1.0, 11.0]] * 2


def test_the_hook_broadcasts_variables_that_a_later_session_adds() -> None:
    def body(context: Context) -> list[float]:
        hook, got = hvd.BroadcastGlobalVariablesHook(1), []
        with tf.Graph().as_default() as graph:
            for number in range(2):
                variable = v1.Variable(float(10 * number + context.rank), use_resource=True)
                hook.begin()
                with v1.Session() as session:
                    session.run(v1.global_variables_initializer())
                    hook.after_create_session(session, v1.train.Coordinator())
                    got.append(float(session.run(variable)))
            graph.finalize()
            hook.begin()
        return got

    assert run_ranks(2, body) == [[1.0, 11.0]] * 2


def test_objects() -> None:
    def body(context: Context) -> tuple[Any, ...]:
        mine = {"rank": context.rank, "name": "x" * 1000 * context.rank}
        spread = hvd.broadcast_object(mine, root_rank=1)
        gathered = hvd.allgather_object(mine, name="all")
        with tf.Graph().as_default(), v1.Session() as session:
            send = hvd.broadcast_object_fn(root_rank=0, session=session, name="sent")
            pair = send(mine if context.rank == 0 else None), send([context.rank])
            more = hvd.broadcast_object(mine, session=session), hvd.allgather_object(context.rank, session=session)
        return spread, gathered, pair, more

    what = [{"rank": rank, "name": "x" * 1000 * rank} for rank in range(2)]
    for got in run_ranks(2, body):
        assert got == (what[1], what, (what[0], [0]), (what[0], [0, 1]))
