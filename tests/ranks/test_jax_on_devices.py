"""JAX's custom call on arrays of GPUs, over a stand-in for CUDA and calls of XLA made by hand; without JAX itself."""

import numpy as np
import pytest

from farandole.core.context import Context
from farandole.core.operations import kinds
from farandole.core.plugins import plugin_path
from helpers.device_arrays import ExchangeArray, use_default_stream
from helpers.ranks import run_ranks
from helpers.stand_in_cuda import load
from helpers.xla_frames import CallFailed, call

pytestmark = pytest.mark.skipif(not plugin_path("jax").exists(), reason="farandole was built without its JAX plugin")


@pytest.fixture(autouse=True)
def devices() -> None:
    load()


def values_of(rank: int, length: int) -> np.ndarray:
    return np.random.default_rng([rank, length]).integers(0, 5, length).astype(np.float32)


def test_every_kind_in_the_streams_of_programs() -> None:
    size, length = 2, 1000

    def body(context: Context) -> None:
        rank, device = context.rank, context.rank % 2
        if rank == 1:
            use_default_stream(device)
        everybody = [values_of(each, length) for each in range(size)]
        for step in range(3):
            # Neither what makes the input nor what follows the call is waited for, as in a program.
            mine, result = ExchangeArray.of(everybody[rank], device), ExchangeArray((length,), np.float32, device)
            call(kinds.ALLREDUCE, "allreduce.x", [mine], [result], postscale=0.5)
            call(kinds.ALLREDUCE, "allreduce.y", [result], [result])
            np.testing.assert_array_equal(result.read(), sum(everybody), err_msg=str(step))
        call(kinds.BROADCAST, "broadcast.x", [mine], [result], root=1)
        np.testing.assert_array_equal(result.read(), everybody[1])
        whole = ExchangeArray((size * length,), np.float32, device)
        call(kinds.ALLGATHER, "allgather.x", [mine], [whole])
        np.testing.assert_array_equal(whole.read(), np.concatenate(everybody))
        call(kinds.ALLTOALL, "alltoall.x", [mine], [result])
        halves = [np.split(each, size)[rank] for each in everybody]
        np.testing.assert_array_equal(result.read(), np.concatenate(halves))
        part = ExchangeArray((length // size,), np.float32, device)
        call(kinds.REDUCESCATTER, "reducescatter.x", [mine], [part])
        np.testing.assert_array_equal(part.read(), np.split(sum(everybody), size)[rank])
        group = [ExchangeArray.of(values_of(rank, count), device) for count in (3, 0, 700)]
        call(kinds.ALLREDUCE, "grouped_allreduce.x", group, group, grouped=True)
        for array, count in zip(group, (3, 0, 700), strict=True):
            np.testing.assert_array_equal(array.read(), sum(values_of(each, count) for each in range(size)))

    run_ranks(size, body)


def test_errors_are_those_of_the_call() -> None:
    def body(context: Context) -> None:
        mine = ExchangeArray.of(values_of(0, 3 + context.rank))
        with pytest.raises(CallFailed, match=r"9, .*allreduce.x.*differs between ranks in its shape"):
            call(kinds.ALLREDUCE, "allreduce.x", [mine], [mine])
        small = ExchangeArray((3,), np.float32)
        with pytest.raises(CallFailed, match=r"3, .*allgather.x.*28 bytes and the output 12"):
            call(kinds.ALLGATHER, "allgather.x", [mine], [small])
        if context.rank == 0:
            context.shutdown()
            return
        with pytest.raises(CallFailed, match=r"10, .*rank 0 is lost"):
            call(kinds.ALLREDUCE, "allreduce.z", [mine], [mine])

    run_ranks(2, body)


def test_shutdown_ends_the_staging_of_calls() -> None:
    def body(context: Context) -> None:
        mine = ExchangeArray.of(values_of(0, 3))
        call(kinds.ALLREDUCE, "allreduce.x", [mine], [mine])
        context.shutdown()
        with pytest.raises(CallFailed):
            call(kinds.ALLREDUCE, "allreduce.x", [mine], [mine])

    run_ranks(1, body)
