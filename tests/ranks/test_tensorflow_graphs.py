"""TensorFlow's operations in the middle of what a function or a graph does: loops, branches, order, what TensorFlow may
not change, and names."""

import ctypes
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farandole.numpy
from farandole.core.context import Context
from farandole.core.default import use
from farandole.core.plugins import core_table, plugin_path
from helpers.ranks import run_ranks

tf = pytest.importorskip("tensorflow")

import farandole.tensorflow as hvd  # noqa: E402  # after the module that it needs is known to be there
from farandole.tensorflow.plugin import operations  # noqa: E402


def asked(context: Context) -> int:
    """Return how many operations this rank has done."""
    return context.engine.stats()["operations"]


def test_operations_run_in_any_order() -> None:
    """Nothing would end if a function ran them one after the other, as it does with others that are stateful."""

    def body(context: Context) -> list[float]:
        @tf.function(autograph=False)
        def many(x: tf.Tensor) -> list[tf.Tensor]:
            places = range(60) if context.rank == 0 else reversed(range(60))
            found = {place: hvd.allreduce(x * place, op=hvd.Sum, name=f"t{place}") for place in places}
            return [found[place] for place in range(60)]

        for _ in range(3):
            got = many(tf.constant(1.0))
        return [float(each) for each in got]

    assert run_ranks(2, body) == [[2.0 * place for place in range(60)]] * 2


@pytest.mark.parametrize("hosts", [1, 2])
def test_threads_that_wait_and_functions_that_nobody_waits_for(hosts: int) -> None:
    """Who waits drives the engine, and what it completes for others is told to them."""

    def body(context: Context) -> None:
        def of_functions() -> None:
            with use(context):

                @tf.function(autograph=False)
                def many(x: tf.Tensor) -> list[tf.Tensor]:
                    return [hvd.allreduce(x * place, op=hvd.Sum, name=f"t{place}") for place in range(30)]

                for _ in range(10):
                    assert [float(each) for each in many(tf.constant(1.0))] == [2.0 * place for place in range(30)]

        def at_once() -> None:
            with use(context):
                for _ in range(50):
                    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="at once")) == 2

        with ThreadPoolExecutor(2) as pool:
            others = [pool.submit(of_functions), pool.submit(at_once)]
            for _ in range(300):
                total = farandole.numpy.allreduce(np.ones(1000), op=hvd.Sum, name="waited for")
                assert (total == 2).all()
            for other in others:
                other.result()

    run_ranks(2, body, hosts=hosts)


def test_loops_branches_and_data() -> None:
    def body(context: Context) -> tuple[float, float, float]:
        @tf.function
        def looped(x: tf.Tensor, rounds: tf.Tensor) -> tf.Tensor:
            for step in tf.range(rounds):
                if step % 2 == 0:
                    x = hvd.allreduce(x, op=hvd.Sum)
                else:
                    x = hvd.allreduce(x - 1.0) + hvd.broadcast(x, 0) * 0.0
            return x

        @tf.function
        def fed(data: tf.data.Dataset) -> tf.Tensor:
            total = tf.constant(0.0)
            for row in data:
                total += hvd.allreduce(row, op=hvd.Sum, name="row")
            return total

        x = tf.constant(1.0 + context.rank)
        data = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0]).map(lambda row: row * (context.rank + 1.0))
        eager = sum(float(hvd.allreduce(row, op=hvd.Sum)) for row in data)
        return float(looped(x, tf.constant(4))), float(fed(data)), eager

    assert run_ranks(2, body) == [(3.0, 18.0, 18.0)] * 2


def test_graphs_of_tensorflow_1() -> None:
    def body(context: Context) -> list[Any]:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            fed = tf.compat.v1.placeholder(tf.float32, [None, 2])
            outputs = [
                hvd.allreduce(fed, op=hvd.Sum),
                hvd.allgather(fed[: context.rank + 1]),
                hvd.rank_op(),
                tf.gradients(hvd.allreduce(fed * fed, op=hvd.Sum), fed)[0],
            ]
            assert [output.shape.as_list() for output in outputs[:2]] == [[None, 2], [None, 2]]
            values = np.full((3, 2), 1.0 + context.rank, np.float32)
            return [session.run(outputs, {fed: values}) for _ in range(2)][1]

    for rank, (total, rows, own, grad) in enumerate(run_ranks(2, body)):
        np.testing.assert_array_equal(total, np.full((3, 2), 3))
        np.testing.assert_array_equal(rows, [[1, 1], [2, 2], [2, 2]])
        assert own == rank
        np.testing.assert_array_equal(grad, np.full((3, 2), 2 * 2 * (rank + 1)))


def test_tensorflow_leaves_out_nothing_and_merges_nothing() -> None:
    """It folds constants, drops what nobody uses and merges what is alike: ranks would wait for each other in vain."""

    def body(context: Context) -> int:
        @tf.function(autograph=False)
        def ask(x: tf.Tensor) -> tf.Tensor:
            hvd.allreduce(x + 1.0)  # nobody uses it
            hvd.broadcast(tf.zeros(3), 0, name="constant")
            return hvd.allreduce(x) + hvd.allreduce(x) + hvd.allreduce(tf.ones(3) * 2.0)

        before = asked(context)
        for _ in range(5):
            np.testing.assert_array_equal(ask(tf.ones(3)), [4, 4, 4])
        return asked(context) - before

    assert run_ranks(2, body) == [5 * 5] * 2


def test_shapes_that_a_graph_knows() -> None:
    def body(context: Context) -> None:
        @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec(None)])
        def ask(some: tf.Tensor, unknown: tf.Tensor) -> Any:
            found = hvd.allreduce(some), hvd.allgather(some), hvd.reducescatter(some), hvd.alltoall(some)
            assert [each.shape.as_list() for each in found] == [[None, 4]] * 4
            assert hvd.allgather(tf.ones((2, 3))).shape.as_list() == [None, 3]
            assert hvd.allreduce(unknown).shape.rank is None and hvd.allgather(unknown).shape.rank is None
            counts = hvd.alltoall(some, tf.zeros(2, tf.int32))[1]
            assert counts.shape.as_list() == [None] and hvd.size_op().shape.as_list() == []
            return found, hvd.allreduce(unknown, op=hvd.Sum)

        (same, joined, scattered, swapped), total = ask(tf.ones((2, 4)), tf.constant([3.0]))
        assert [each.shape[0] for each in (same, joined, scattered, swapped)] == [2, 4, 1, 2] and float(total[0]) == 6

    run_ranks(2, body)


@pytest.mark.parametrize("ignore", [False, True])
def test_names_have_the_scope_and_come_once(ignore: bool) -> None:
    def body(context: Context) -> list[str]:
        made = []
        with tf.Graph().as_default():
            x = tf.compat.v1.placeholder(tf.float32, [3], name="x")
            with tf.name_scope("layer"):
                for name in ("loss", "loss", None, None):
                    made.append(hvd.allreduce(x, name=name, ignore_name_scope=ignore).op.get_attr("tensor_name"))
        return [each.decode() for each in made]

    ((*named, first, second),) = run_ranks(1, body)
    scope = "" if ignore else "layer/"
    assert named == [f"allreduce.{scope}loss", f"allreduce.{scope}loss_1"]
    assert (first, second) == ("allreduce.x_0", "allreduce.x_0_1")


def test_a_function_within_another_has_names_of_its_own() -> None:
    """It was traced before, when nobody knew which names the other one would have."""

    def body(context: Context) -> list[list[float]]:
        weight = tf.Variable([1.0, 1.0])

        def late(x: tf.Tensor, rank: int) -> tf.Tensor:
            """Make the ranks begin the operations in different orders."""
            slow = tf.numpy_function(lambda x: time.sleep(0.2 * (rank == context.rank)) or x, [x], tf.float32, False)
            return tf.ensure_shape(slow, x.shape)

        def gradient(x: tf.Tensor, rank: int) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * late(x, rank))
            return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, weight)

        @tf.function(autograph=False)
        def inner(x: tf.Tensor) -> list[tf.Tensor]:
            return [hvd.allreduce(late(x, 0), op=hvd.Sum), gradient(x, 0)]

        @tf.function(autograph=False)
        def outer(x: tf.Tensor) -> list[tf.Tensor]:
            return [hvd.allreduce(late(x, 1), op=hvd.Sum), gradient(x, 1), *inner(10.0 * x)]

        inner(tf.ones(2))
        return [each.numpy().tolist() for _ in range(2) for each in outer(tf.ones(2))]

    assert run_ranks(2, body, how="processes", framework="tensorflow") == [2 * [[2, 2], [2, 2], [20, 20], [20, 20]]] * 2


def test_what_xla_compiles_cannot_hold_them() -> None:
    def body(context: Context) -> float:
        @tf.function(jit_compile=True, autograph=False)
        def compiled(x: tf.Tensor) -> tf.Tensor:
            return hvd.allreduce(x * 2.0, name="loss")

        with pytest.raises(NotImplementedError, match=r"allreduce\.loss.*jit_compile=False"):
            compiled(tf.ones(3))

        square = tf.function(lambda x: x * x, jit_compile=True, autograph=False)
        around = tf.function(lambda x: hvd.allreduce(square(x), op=hvd.Sum), autograph=False)
        return float(around(tf.constant(3.0)))

    assert run_ranks(2, body) == [18.0] * 2


def test_a_second_copy_of_the_library_adds_nothing(tmp_path: Path) -> None:
    """TensorFlow would refuse to run either's operations."""
    operations()
    copy = ctypes.CDLL(str(shutil.copy(plugin_path("tensorflow"), tmp_path / "_tensorflow.so")))
    connect = copy.farandole_tensorflow_connect
    connect.argtypes, connect.restype = [ctypes.c_void_p], ctypes.c_char_p
    assert b"another copy of farandole" in connect(core_table())
    run_ranks(1, lambda context: hvd.allreduce(tf.ones(3)))
