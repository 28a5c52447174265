"""TensorFlow's operations, at once and in functions: what they compute, and how they fail."""

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from farandole.config import Config
from farandole.core.context import Context
from farandole.errors import NotInitializedError
from farandole.meeting.rendezvous import SoloRendezvous
from helpers.deaths import wait_for_others
from helpers.ranks import run_ranks

tf = pytest.importorskip("tensorflow")

import farandole.tensorflow as hvd  # noqa: E402  # after the module that it needs is known to be there

Array = npt.NDArray[Any]
Body = Callable[..., Any]

# A function is traced by the rank that calls it. AutoGraph cannot read a lambda in a list, and logs that for ever.
MODES: dict[str, Callable[[Body], Body]] = {
    "eager": lambda body: body,
    "function": lambda body: tf.function(body, autograph=False),
}
modes = pytest.mark.parametrize("mode", MODES)

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")


def arrays(results: Any) -> Any:
    return tf.nest.map_structure(np.asarray, results)


@modes
@pytest.mark.parametrize("hosts", [1, 2])
def test_every_kind(mode: str, hosts: int) -> None:
    def body(context: Context) -> list[Any]:
        def every_kind(x: tf.Tensor) -> tuple[Any, ...]:
            return (
                hvd.allreduce(x, op=hvd.Sum),
                hvd.allreduce(x, prescale_factor=1 / 3, postscale_factor=3.0, name="scaled"),
                hvd.grouped_allreduce([x, 2 * x], op=hvd.Max),
                hvd.allgather(x[: context.rank + 1]),
                hvd.grouped_allgather([x[context.rank :], x[:0]]),
                hvd.broadcast(x, 1),
                hvd.reducescatter(x, op=hvd.Sum),
                hvd.grouped_reducescatter([x, x[:, tf.newaxis]]),
                hvd.alltoall(x, splits=[1, 2]),
                hvd.alltoall(x[:2]),
            )

        return arrays(MODES[mode](every_kind)(tf.constant([1.0, 2.0, 3.0]) * (context.rank + 1)))

    own = [([3, 6], [1.5, 3], [1, 2], [1, 1], [1, 2]), ([9], [4.5], [2, 3, 4, 6], [2, 2], [2, 4])]
    for got, (scattered, mean, sent, counts, swapped) in zip(run_ranks(2, body, hosts=hosts), own, strict=True):
        np.testing.assert_array_equal(got[0], [3, 6, 9])
        np.testing.assert_allclose(got[1], [1.5, 3, 4.5], rtol=1e-6)
        np.testing.assert_array_equal(got[2], [[2, 4, 6], [4, 8, 12]])
        np.testing.assert_array_equal(got[3], [1, 2, 4])
        np.testing.assert_array_equal(got[4][0], [1, 2, 3, 4, 6])
        assert got[4][1].shape == (0,)
        np.testing.assert_array_equal(got[5], [2, 4, 6])
        np.testing.assert_array_equal(got[6], scattered)
        np.testing.assert_array_equal(got[7][0], mean)
        assert got[7][1].shape == (len(mean), 1)
        np.testing.assert_array_equal(got[8][0], sent)
        np.testing.assert_array_equal(got[8][1], counts)
        np.testing.assert_array_equal(got[9], swapped)


@modes
def test_every_dtype(mode: str) -> None:
    def body(context: Context) -> dict[str, list[Array]]:
        def of_all(tensors: dict[str, tf.Tensor]) -> dict[str, list[tf.Tensor]]:
            found = {}
            for dtype, tensor in tensors.items():
                op = hvd.Max if dtype == "bool" else hvd.Sum
                found[dtype] = [
                    hvd.allreduce(tensor, op=op, name=f"{mode}.{dtype}"),
                    hvd.allgather(tensor, name=f"{mode}.{dtype}"),
                    hvd.broadcast(tensor, 1, name=f"{mode}.{dtype}"),
                ]
            return found

        tensors = {
            dtype: tf.cast(tf.constant([[0, 1], [2, 3]]) * context.rank, dtype)
            for dtype in (*INTEGERS, *FLOATS, "bool")
        }
        got = MODES[mode](of_all)(tensors)
        assert all(tensor.dtype == dtype for dtype, three in got.items() for tensor in three)
        return {dtype: [tf.cast(tensor, tf.float64).numpy() for tensor in three] for dtype, three in got.items()}

    theirs = np.array([[0, 1], [2, 3]])
    for got in run_ranks(2, body):
        for dtype, (reduced, gathered, spread) in got.items():
            expected = theirs != 0 if dtype == "bool" else theirs
            np.testing.assert_array_equal(reduced, expected)
            np.testing.assert_array_equal(gathered, np.concatenate([0 * expected, expected]))
            np.testing.assert_array_equal(spread, expected)


@modes
def test_scalars_and_nothing(mode: str) -> None:
    def body(context: Context) -> list[Any]:
        def few(x: tf.Tensor, none: tf.Tensor) -> list[Any]:
            summed = hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(none), hvd.grouped_allreduce([none, x], op=hvd.Sum)
            return [*summed, hvd.allgather(none), hvd.broadcast(x, 1), hvd.alltoall(none, [0, 0])]

        return arrays(MODES[mode](few)(tf.constant(2.0 + context.rank), tf.zeros((0, 3))))

    for total, none, (none_too, total_too), joined, spread, (swapped, counts) in run_ranks(2, body):
        assert total == total_too == 5 and spread == 3
        assert none.shape == none_too.shape == joined.shape == swapped.shape == (0, 3)
        np.testing.assert_array_equal(counts, [0, 0])


@modes
def test_slices_of_all_ranks_add_up_to_the_dense_sum(mode: str) -> None:
    def body(context: Context) -> list[Array]:
        rank = context.rank

        def both(values: tf.Tensor, dense: tf.Tensor) -> list[tf.Tensor]:
            slices = tf.IndexedSlices(values, tf.constant([rank, 3, 3]), dense_shape=tf.constant([5, 2]))
            summed, mixed = hvd.allreduce(slices, op=hvd.Sum), hvd.grouped_allreduce([slices, dense], name="mixed")
            assert isinstance(summed, tf.IndexedSlices) and isinstance(mixed[0], tf.IndexedSlices)
            return [tf.convert_to_tensor(summed), tf.convert_to_tensor(mixed[0]), mixed[1]]

        values = tf.reshape(tf.range(6.0), (3, 2)) * (rank + 1)
        return list(arrays(MODES[mode](both)(values, tf.ones(2) * rank)))

    expected = np.zeros((5, 2))
    for rank in range(2):
        np.add.at(expected, [rank, 3, 3], np.arange(6.0).reshape(3, 2) * (rank + 1))
    for summed, mean, dense in run_ranks(2, body):
        np.testing.assert_allclose(summed, expected)
        np.testing.assert_allclose(mean, expected / 2)
        np.testing.assert_allclose(dense, [0.5, 0.5])


@modes
@pytest.mark.parametrize(
    ("given", "returned"),
    [("int8", "float32"), ("uint8", "float32"), ("int32", "float64"), ("int64", "float64"), ("float16", "float16")],
)
def test_averages_of_integer_slices_are_floating_point(mode: str, given: str, returned: str) -> None:
    """As `tf.truediv` does, and therefore Horovod."""

    def body(context: Context) -> list[Array]:
        def every_way(values: tf.Tensor, dense: tf.Tensor) -> list[tf.Tensor]:
            slices = tf.IndexedSlices(values, tf.constant([context.rank]), dense_shape=tf.constant([2, 2]))
            single = hvd.allreduce(slices, name="single")
            both = hvd.grouped_allreduce([slices, slices], name="both")
            sparse, mean = hvd.grouped_allreduce([slices, dense], name="mixed")
            summed = hvd.allreduce(slices, op=hvd.Sum, name="sum")
            return [*(each.values for each in (single, *both, sparse)), summed.values, mean]

        mine = tf.cast(tf.constant([[3, -5]]) * (2 * context.rank + 1), given)
        return list(arrays(MODES[mode](every_way)(mine, tf.ones(2, tf.float32) * context.rank)))

    wide = np.array([[3, -5], [9, -15]]).astype(given)
    for *means, summed, dense in run_ranks(2, body):
        for mean in means:
            assert mean.dtype == returned
            np.testing.assert_array_equal(mean, wide / 2)
        assert summed.dtype == given
        np.testing.assert_array_equal(summed, wide)
        np.testing.assert_array_equal(dense, [0.5, 0.5])


def test_slices_refuse_what_cannot_be_added_up() -> None:
    def body(context: Context) -> None:
        slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), dense_shape=tf.constant([5, 2]))
        with pytest.raises(NotImplementedError, match="Average or op=Sum"):
            hvd.allreduce(slices, op=hvd.Max)
        with pytest.raises(NotImplementedError, match="prescale_factor"):
            hvd.allreduce(slices, prescale_factor=2.0)
        # Their average would lose the imaginary part.
        pair = tf.IndexedSlices(tf.ones((1, 2), tf.complex64), tf.constant([0]), dense_shape=tf.constant([5, 2]))
        with pytest.raises(tf.errors.InvalidArgumentError, match="complex64"):
            hvd.allreduce(pair)

    run_ranks(1, body)


@modes
@pytest.mark.parametrize(("compression", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_compression_rounds_floats_and_leaves_integers(mode: str, compression: str, dtype: str) -> None:
    def body(context: Context) -> Any:
        def smaller(x: tf.Tensor, n: tf.Tensor) -> Any:
            way = getattr(hvd.Compression, compression)
            one = hvd.allreduce(x, op=hvd.Sum, compression=way), hvd.allreduce(n, op=hvd.Sum, compression=way)
            return *one, hvd.reducescatter(x, op=hvd.Sum, compression=way)

        return arrays(MODES[mode](smaller)(tf.constant([1.001, 3.14159]), tf.constant([100_001])))

    rounded = tf.cast(tf.cast(tf.constant([1.001, 3.14159]), dtype), tf.float32).numpy()
    for rank, (floats, integers, row) in enumerate(run_ranks(2, body)):
        assert floats.dtype == np.float32 and integers.dtype == np.int32
        np.testing.assert_array_equal(floats, 2 * rounded)
        np.testing.assert_array_equal(integers, [200_002])
        np.testing.assert_array_equal(row, [2 * rounded[rank]])


@modes
def test_a_process_set_works_on_its_own(mode: str) -> None:
    def body(context: Context) -> list[Any] | None:
        pair = hvd.add_process_set([0, 2])
        outside = hvd.size_op(pair.process_set_id), hvd.process_set_included_op(pair.process_set_id)
        assert [int(each) for each in outside] == [pair.size(), int(context.rank != 1)]
        assert int(tf.function(lambda: hvd.size_op(pair.process_set_id, name="pair"))()) == 2

        def ask(x: tf.Tensor) -> list[tf.Tensor]:
            return [hvd.allreduce(x, process_set=pair), hvd.broadcast(x, 2, process_set=pair)]

        x = tf.constant([1.0 + context.rank])
        if context.rank == 1:
            with pytest.raises(tf.errors.InvalidArgumentError, match="Rank 1 is not a member of the provided process"):
                MODES[mode](ask)(x)
            return None
        got = [float(each[0]) for each in MODES[mode](ask)(x)]
        with pytest.raises(tf.errors.InvalidArgumentError, match="root rank 1"):
            hvd.broadcast(x, 1, process_set=pair)
        return got

    assert run_ranks(3, body) == [[2.0, 3.0], None, [2.0, 3.0]]


@modes
def test_a_disagreement_names_the_ranks_and_the_tensor(mode: str) -> None:
    def body(context: Context) -> list[str]:
        def ask(x: tf.Tensor) -> tf.Tensor:
            return hvd.allreduce(x, name="loss")

        texts = []
        for odd in (tf.ones(3 + context.rank), tf.ones(3, (tf.float32, tf.float64)[context.rank])):
            with pytest.raises(tf.errors.FailedPreconditionError) as caught:
                MODES[mode](ask)(odd)
            texts.append(str(caught.value))
        assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == 2  # the job goes on
        return texts

    for shapes, types in run_ranks(2, body):
        assert "loss' differs between ranks in its shape (rank 0: float32[3]; rank 1: float32[4])" in shapes
        assert "rank 0: float32[3]; rank 1: float64[3]" in types


@modes
@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda x: hvd.broadcast(x, 7), "invalid root rank 7"),
        (lambda x: hvd.alltoall(x, splits=[1, 2, 3]), "splits holds 3 numbers for 1 ranks"),
        (lambda x: hvd.alltoall(x, splits=[9]), "more than the first dimension"),
        (lambda x: hvd.alltoall(x, splits=[1.5]), "splits must be integers, got float32"),
        (lambda x: hvd.alltoall(x, splits=tf.constant([2**32 + 1], tf.int64)), "more than the first dimension"),
        (lambda x: hvd.allgather(x[0]), "at least one dimension"),
        (lambda x: hvd.allreduce(tf.cast(x, tf.int32), op=hvd.Adasum), "Adasum combines floating-point"),
        (lambda x: hvd.reducescatter(x, op=hvd.Max), "Average and Sum only"),
        (lambda x: hvd.allreduce(tf.sparse.from_dense(x), name="s"), "'allreduce.s': a SparseTensor cannot be sent"),
        (lambda x: hvd.allgather(tf.RaggedTensor.from_row_lengths(x, [1, 2])), "values and row_splits one by one"),
        (lambda x: hvd.allreduce(x, process_set=hvd.ProcessSet([0])), "add_process_set first"),
    ],
)
def test_what_is_wrong_on_this_rank_alone_is_refused(mode: str, ask: Body, text: str) -> None:
    def body(context: Context) -> None:
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            MODES[mode](ask)(tf.ones(3))

    run_ranks(1, body)


@modes
def test_who_waits_hears_of_a_rank_that_leaves(mode: str) -> None:
    def body(context: Context) -> None:
        def ask(xs: list[tf.Tensor]) -> list[tf.Tensor]:
            return [hvd.allreduce(x) for x in xs]

        hvd.barrier()
        if context.rank == 1:
            return
        # All that are pending fail, or the function would never end.
        with pytest.raises(tf.errors.AbortedError, match="rank 1"):
            MODES[mode](ask)([tf.ones(3)] * 20)

    run_ranks(2, body)


@modes
def test_a_rank_that_does_not_come_is_named(mode: str) -> None:
    told = threading.Event()

    def body(context: Context) -> None:
        if context.rank == 1:
            assert told.wait(60)
            return
        with pytest.raises(tf.errors.DeadlineExceededError, match=r"allreduce\.late.*rank 1 did not take part"):
            MODES[mode](lambda x: hvd.allreduce(x, name="late"))(tf.ones(3))
        told.set()

    run_ranks(2, body, config=Config(collective_timeout=timedelta(seconds=0.3)))


def test_a_function_hears_of_a_rank_that_is_killed(tmp_path: Path) -> None:
    def body(context: Context) -> str:
        @tf.function(autograph=False)
        def ask(xs: list[tf.Tensor]) -> list[tf.Tensor]:
            return [hvd.allreduce(x) for x in xs]

        ask([tf.ones(3)] * 20)
        wait_for_others(context, 1, tmp_path)
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(tf.errors.AbortedError) as caught:
            ask([tf.ones(3)] * 20)
        return str(caught.value)

    text, _ = run_ranks(2, body, how="processes", dies={1}, timeout=150, framework="tensorflow")
    assert "failed: rank 1 is lost (its process was killed or crashed)" in text


def test_a_function_outlives_the_engine_that_it_was_traced_with() -> None:
    @tf.function(autograph=False)
    def ask(x: tf.Tensor) -> list[tf.Tensor]:
        return [hvd.allreduce(x, name="again"), hvd.size_op()]

    with pytest.raises(NotInitializedError):
        hvd.allreduce(tf.ones(3))
    for _ in range(2):
        with pytest.raises(tf.errors.FailedPreconditionError, match="init"):
            ask(tf.ones(3))
        hvd.init(rendezvous=SoloRendezvous())
        try:
            assert int(ask(tf.ones(3))[1]) == 1
        finally:
            hvd.shutdown()
    assert ask.experimental_get_tracing_count() == 1


@modes
def test_join_takes_part_until_all_have_joined(mode: str) -> None:
    def body(context: Context) -> list[float]:
        ask = MODES[mode](lambda x: hvd.allreduce(x, op=hvd.Sum, name="step"))
        got = [float(ask(tf.constant(1.0))) for _ in range(1 + 2 * context.rank)]
        return [*got, int(hvd.join())]

    assert run_ranks(2, body) == [[2.0, 1], [2.0, 1.0, 1.0, 1]]


@pytest.mark.parametrize("mode", ["eager", "function", "graph"])
def test_variables_are_overwritten_with_the_roots(mode: str) -> None:
    def body(context: Context) -> list[Any]:
        if mode == "graph":
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                variables = [tf.compat.v1.get_variable(f"v{place}", initializer=0.5 + context.rank) for place in (0, 1)]
                session.run(tf.compat.v1.global_variables_initializer())
                session.run(hvd.broadcast_(variables, 1))
                return list(session.run(variables))
        variables = [tf.Variable(tf.fill([3], float(context.rank))), tf.Variable(context.rank)]
        MODES[mode](lambda: (hvd.broadcast_(variables, 1), None)[1])()
        return arrays(variables)

    for floats, other in run_ranks(2, body):
        np.testing.assert_array_equal(floats, 1.5 if mode == "graph" else [1, 1, 1])
        assert other == (1.5 if mode == "graph" else 1)
