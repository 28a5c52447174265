"""`horovod.tensorflow`: what its programs call and catch, on ranks."""

import importlib
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from farandole.compat import install, uninstall
from farandole.core.context import Context
from helpers.ranks import run_ranks

tf = pytest.importorskip("tensorflow")


@pytest.fixture
def hvd() -> Iterator[ModuleType]:
    install()
    yield importlib.import_module("horovod.tensorflow")
    uninstall()


def test_what_ranks_ask_differently_is_a_failed_precondition(hvd: ModuleType) -> None:
    def body(context: Context) -> str:
        with pytest.raises(tf.errors.FailedPreconditionError) as raised:
            hvd.allreduce(tf.ones(2, [tf.float32, tf.int32][context.rank]), name="w")
        # The job goes on: only this tensor has failed.
        assert hvd.allreduce(tf.ones(1), op=hvd.Sum, name="after").numpy() == context.size
        return str(raised.value)

    for text in run_ranks(2, body):
        assert "float32" in text and "int32" in text and "rank 1" in text


def test_what_is_wrong_on_this_rank_is_an_invalid_argument(hvd: ModuleType) -> None:
    def body(context: Context) -> None:
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="splits"):
            hvd.alltoall(tf.ones(2), splits=[7, 8], name="w")
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="root"):
            hvd.broadcast(tf.ones(2), root_rank=5, name="w")

    run_ranks(2, body)


def test_a_rank_that_leaves_is_named(hvd: ModuleType) -> None:
    def body(context: Context) -> str:
        if context.rank == 1:
            context.shutdown()
            return ""
        with pytest.raises(tf.errors.AbortedError) as raised:
            for _ in range(2):
                hvd.allreduce(tf.ones(1), name="w")
        return str(raised.value)

    assert "rank 1" in run_ranks(2, body)[0]


def test_before_init(hvd: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd.init\(\)"):
        hvd.size()
    with pytest.raises((tf.errors.FailedPreconditionError, hvd.HorovodInternalError, ValueError), match="init"):
        hvd.allreduce(tf.ones(1), name="w")


def test_a_users_own_compressor(hvd: ModuleType) -> None:
    compression = importlib.import_module("horovod.tensorflow.compression")

    class Halved(compression.Compressor):
        @staticmethod
        def compress(tensor: object) -> tuple[object, object]:
            return compression.FP16Compressor.compress(tensor / 2)

        @staticmethod
        def decompress(tensor: object, ctx: object) -> object:
            return 2 * compression.FP16Compressor.decompress(tensor, ctx)

    def body(context: Context) -> object:
        return hvd.allreduce(tf.constant([1.0, 3.0]) + context.rank, compression=Halved).numpy()

    for got in run_ranks(2, body):
        np.testing.assert_array_equal(got, [1.5, 3.5])


def test_what_horovods_own_tests_ask_of_its_inside(hvd: ModuleType) -> None:
    assert hvd._executing_eagerly() and hvd.util._executing_eagerly()
    with tf.Graph().as_default():
        assert not hvd._executing_eagerly()

    def body(context: Context) -> None:
        basics = hvd.mpi_ops._basics
        assert basics.rank() == context.rank
        assert basics._get_process_set_ids_and_ranks() == {0: [0, 1]}
        last = hvd.add_process_set([1])
        assert basics._get_process_set_ids_and_ranks() == {0: [0, 1], last.process_set_id: [1]}
        hvd.remove_process_set(last)
        assert basics._get_process_set_ids_and_ranks() == {0: [0, 1]}

    run_ranks(2, body)


def test_the_sum_inside_mpi_ops_that_programs_call(hvd: ModuleType) -> None:
    def body(context: Context) -> tuple[object, object, object]:
        mine = tf.constant([1.0 + context.rank])
        whole = hvd.mpi_ops._allreduce(mine, name="w")
        halved = hvd._allreduce(mine, op=hvd.Average, prescale_factor=0.5)
        return whole.numpy().tolist(), halved.numpy().tolist(), hvd._allreduce is hvd.mpi_ops._allreduce

    assert run_ranks(2, body) == [([3.0], [0.75], True)] * 2


def test_the_classes_of_optimizers_that_programs_compare(hvd: ModuleType) -> None:
    def body(context: Context) -> None:
        plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        assert isinstance(plain, hvd._LegacyOptimizer) and not isinstance(plain, hvd._DistributedOptimizer)
        assert isinstance(hvd.DistributedOptimizer(plain), hvd._DistributedOptimizer)

    run_ranks(2, body)
