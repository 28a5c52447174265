"""Tensors in device memory by NCCL, over stand-ins for CUDA and NCCL whose work is late."""

import threading
import time

import numpy as np
import pytest

from farandole.config import Config
from farandole.core.context import Context
from farandole.errors import InvalidRequest
from helpers import stand_in_nccl
from helpers.device_arrays import DeviceArray, ExchangeArray, ProtocolArray, binding_of, current_stream
from helpers.ranks import run_ranks
from helpers.stand_in_cuda import load

every_kind = pytest.mark.parametrize("kind", [ProtocolArray, ExchangeArray], ids=lambda kind: kind.__name__)
LENGTHS = (1, 1000, 60_001)


@pytest.fixture(autouse=True)
def by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_nccl.choose(monkeypatch)


def values_of(rank: int, length: int) -> np.ndarray:
    return np.random.default_rng([rank, length]).integers(0, 5, length).astype(np.float32)


@every_kind
@pytest.mark.parametrize("size", [1, 2])
def test_every_operation(kind: type[DeviceArray], size: int) -> None:
    hvd = binding_of(kind)

    def body(context: Context) -> None:
        rank = device = context.rank
        for length in LENGTHS:
            inputs = [values_of(each, length) for each in range(size)]
            mine = kind.of(inputs[rank], device)
            total = np.sum(inputs, 0)
            np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum).read(), total)
            np.testing.assert_allclose(hvd.allreduce(mine, prescale_factor=3.0).read(), total * 3 / size, rtol=1e-6)
            for root in range(size):
                np.testing.assert_array_equal(hvd.broadcast(mine, root).read(), inputs[root])
            halves = kind.of(inputs[rank].astype(np.float16), device)
            np.testing.assert_array_equal(hvd.allreduce(halves, op=hvd.Sum).read(), total.astype(np.float16))
            rows = [values_of(each, each * length) for each in range(size)]
            np.testing.assert_array_equal(hvd.allgather(kind.of(rows[rank], device)).read(), np.concatenate(rows))
            scattered = hvd.reducescatter(kind.of(inputs[rank], device), op=hvd.Sum, name="rs").read()
            np.testing.assert_array_equal(scattered, np.array_split(total, size)[rank])
            sent = kind.of(np.repeat(inputs[rank], size), device)
            got, counts = hvd.alltoall(sent, splits=[length] * size)
            parts = [np.repeat(each, size)[rank * length : (rank + 1) * length] for each in inputs]
            np.testing.assert_array_equal(got.read(), np.concatenate(parts))
            np.testing.assert_array_equal(counts.read(), [length] * size)
            # Host memory has what NCCL has not.
            assert hvd.allreduce_(mine, op=hvd.Max, name="in place") is mine
            np.testing.assert_array_equal(mine.read(), np.max(inputs, 0))
        group = [kind.of(values_of(rank, count), device) for count in LENGTHS]
        for result, count in zip(hvd.grouped_allreduce(group, op=hvd.Sum), LENGTHS, strict=True):
            np.testing.assert_array_equal(result.read(), sum(values_of(each, count) for each in range(size)))

    run = stand_in_nccl.load().stand_in_nccl_run()
    run_ranks(size, body)
    assert stand_in_nccl.load().stand_in_nccl_run() > run
    assert stand_in_nccl.load().stand_in_nccl_mismatches() == stand_in_nccl.load().stand_in_nccl_strays() == 0
    assert load().stand_in_error() == 0


@every_kind
def test_no_host_memory_is_touched(kind: type[DeviceArray]) -> None:
    hvd = binding_of(kind)

    def body(context: Context) -> int:
        for step in range(5):
            mine = kind.of(np.full(2000, step, np.float32), context.rank)
            np.testing.assert_array_equal(hvd.allreduce_(mine, name="x", op=hvd.Sum).read(), np.full(2000, 2 * step))
            for result in hvd.grouped_allgather([mine, mine], name="g"):
                np.testing.assert_array_equal(result.read(), np.full(4000, 2 * step))
            np.testing.assert_array_equal(hvd.reducescatter(mine, op=hvd.Sum).read(), np.full(1000, 4 * step))
            np.testing.assert_array_equal(hvd.alltoall(mine).read(), np.full(2000, 2 * step))
        return int(load().stand_in_calls(b"cuMemcpyDtoHAsync"))

    before = load().stand_in_calls(b"cuMemcpyDtoHAsync")
    assert run_ranks(2, body) == [before, before]


def test_the_thread_does_not_wait_for_the_input() -> None:
    hvd = binding_of(ExchangeArray)

    def body(context: Context) -> None:
        device = context.rank
        hvd.allreduce_(ExchangeArray.of(np.ones(1, np.float32), device), name="first").read()
        arrays = [ExchangeArray((500,), np.float32, device) for _ in range(30)]
        gate = load().stand_in_close(current_stream(device))
        for place, array in enumerate(arrays):
            array.fill(np.full(500, place + context.rank, np.float32))
        handles = [hvd.allreduce_async_(array, op=hvd.Sum, name=f"a{place}") for place, array in enumerate(arrays)]
        for handle in handles:
            hvd.synchronize(handle)
        load().stand_in_open(gate)
        for place, array in enumerate(arrays):
            np.testing.assert_array_equal(array.read(), np.full(500, 2 * place + 1))

    run_ranks(2, body)


@every_kind
def test_a_joined_rank_takes_part_on_its_device(kind: type[DeviceArray]) -> None:
    hvd = binding_of(kind)

    def body(context: Context) -> None:
        mine = kind.of(np.full(9, context.rank + 1, np.float32), context.rank)
        np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum).read(), np.full(9, 3))
        copies = load().stand_in_calls(b"cuMemcpyDtoHAsync")
        if context.rank == 1:
            np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Average).read(), np.full(9, 1))
            np.testing.assert_array_equal(hvd.allgather(mine).read(), np.full(9, 2))
        assert hvd.join() == 1
        assert load().stand_in_calls(b"cuMemcpyDtoHAsync") == copies

    run_ranks(2, body)


def test_a_process_set_has_a_communicator_of_its_own() -> None:
    hvd = binding_of(ExchangeArray)

    def body(context: Context) -> None:
        single = hvd.add_process_set([1])
        mine = ExchangeArray.of(np.full(9, context.rank + 1, np.float32), context.rank)
        if context.rank == 1:
            np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum, process_set=single).read(), np.full(9, 2))
            np.testing.assert_array_equal(hvd.allgather(mine, process_set=single).read(), np.full(9, 2))
        np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum).read(), np.full(9, 3))

    run_ranks(2, body)


@pytest.mark.parametrize("route", ["auto", "host", "nccl"])
def test_two_ranks_on_one_gpu(route: str) -> None:
    hvd = binding_of(ExchangeArray)

    def body(context: Context) -> None:
        mine = ExchangeArray.of(np.ones(9, np.float32), 0)
        if route == "nccl":
            with pytest.raises(InvalidRequest) as caught:
                hvd.allreduce(mine, op=hvd.Sum, name="x")
            assert str(caught.value) == (
                "'allreduce.x': NCCL is required (HOROVOD_GPU_OPERATIONS or HOROVOD_GPU_ALLREDUCE), but it cannot be "
                "used: ranks 0 and 1 are on the same GPU; let each use the one at its local rank. Set the variable to "
                "MPI to use host memory instead"
            )
        else:
            np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum).read(), np.full(9, 2))
        np.testing.assert_array_equal(hvd.broadcast(mine, 1).read(), np.ones(9))

    run = stand_in_nccl.load().stand_in_nccl_run()
    run_ranks(2, body, config=Config(gpu_allreduce=route))
    assert stand_in_nccl.load().stand_in_nccl_run() == run


def test_an_operation_that_never_ends_is_ended_by_a_failure() -> None:
    """The waits of a type that does not tell its stream get the failure, not garbage."""
    hvd = binding_of(ProtocolArray)
    together = threading.Barrier(2, timeout=30)

    def body(context: Context) -> str:
        mine = ProtocolArray.of(np.ones(9, np.float32), context.rank)
        hvd.allreduce_(mine, op=hvd.Sum, name="x").read()
        together.wait()  # the first one has ended on both ranks
        stand_in_nccl.load().stand_in_nccl_stuck(1)
        handle = hvd.allreduce_async_(mine, op=hvd.Sum, name="x")
        time.sleep(0.05)
        assert not hvd.poll(handle)
        together.wait()  # nothing breaks before both have looked
        stand_in_nccl.load().stand_in_nccl_break(6)
        with pytest.raises(Exception) as caught:
            hvd.synchronize(handle)
        return type(caught.value).__name__

    try:
        assert set(run_ranks(2, body)) <= {"FabricError", "PeerLost"}
    finally:
        stand_in_nccl.load().stand_in_nccl_stuck(0)
        stand_in_nccl.load().stand_in_nccl_break(0)
