"""Tensors in device memory, over a stand-in for CUDA whose work is late: every operation, the waits, the refusals."""

import os

import numpy as np
import pytest

import farandole.numpy as farandole_numpy
from farandole.core.context import Context
from farandole.errors import EngineClosed, FabricError, InvalidRequest, MismatchError, PeerLost
from helpers.device_arrays import (
    DeviceArray,
    ExchangeArray,
    ProtocolArray,
    binding_of,
    current_stream,
    use_default_stream,
)
from helpers.ranks import run_ranks
from helpers.stand_in_cuda import load

every_kind = pytest.mark.parametrize("kind", [ProtocolArray, ExchangeArray], ids=lambda kind: kind.__name__)
LENGTHS = (1, 1000, 60_001)


@pytest.fixture(autouse=True)
def devices() -> None:
    load()


def values_of(rank: int, length: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng([rank, length]).integers(0, 5, length).astype(dtype)


@every_kind
@pytest.mark.parametrize("size", [1, 3])
def test_every_operation(kind: type[DeviceArray], size: int) -> None:
    hvd = binding_of(kind)

    def body(context: Context) -> None:
        rank, device = context.rank, context.rank % 2
        if rank == 1:
            use_default_stream(device)
        for length in LENGTHS:
            inputs = [values_of(each, length) for each in range(size)]
            mine = kind.of(inputs[rank], device)
            total = np.sum(inputs, 0)
            np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum).read(), total)
            np.testing.assert_array_equal(hvd.reducescatter(mine, op=hvd.Sum).read(), np.array_split(total, size)[rank])
            for root in range(size):
                np.testing.assert_array_equal(hvd.broadcast(mine, root).read(), inputs[root])
            np.testing.assert_array_equal(mine.read(), inputs[rank])
            assert hvd.allreduce_(mine, op=hvd.Max, name="in place") is mine
            np.testing.assert_array_equal(mine.read(), np.max(inputs, 0))
            rows = [values_of(each, each * length) for each in range(size)]
            np.testing.assert_array_equal(hvd.allgather(kind.of(rows[rank], device)).read(), np.concatenate(rows))
            sent = kind.of(np.repeat(inputs[rank], size), device)
            got, counts = hvd.alltoall(sent, splits=[length] * size)
            pieces = [np.repeat(each, size)[rank * length :][:length] for each in inputs]
            np.testing.assert_array_equal(got.read(), np.concatenate(pieces))
            np.testing.assert_array_equal(counts.read(), [length] * size)
        group = [kind.of(values_of(rank, count), device) for count in LENGTHS]
        for result, count in zip(hvd.grouped_allreduce(group, op=hvd.Sum), LENGTHS, strict=True):
            np.testing.assert_array_equal(result.read(), sum(values_of(each, count) for each in range(size)))
        joined = np.concatenate([values_of(each, LENGTHS[1]) for each in range(size)])
        np.testing.assert_array_equal(hvd.grouped_allgather(group[:2])[1].read(), joined)

    run_ranks(size, body)


@every_kind
def test_many_at_once_while_the_input_is_still_computed(kind: type[DeviceArray]) -> None:
    hvd = binding_of(kind)

    def body(context: Context) -> None:
        arrays = [kind((500,), np.float32) for _ in range(30)]
        stream = current_stream(0)
        gate = load().stand_in_close(stream)
        for place, array in enumerate(arrays):
            array.fill(np.full(500, place + context.rank, np.float32))
        handles = [hvd.allreduce_async_(array, op=hvd.Sum, name=f"a{place}") for place, array in enumerate(arrays)]
        assert not any(hvd.poll(handle) for handle in handles)
        load().stand_in_open(gate)
        for place, handle in reversed(list(enumerate(handles))):
            np.testing.assert_array_equal(hvd.synchronize(handle).read(), np.full(500, 2 * place + 1))

    run_ranks(2, body)


@every_kind
def test_a_join_comes_after_what_was_started_before(kind: type[DeviceArray]) -> None:
    hvd = binding_of(kind)

    def body(context: Context) -> None:
        array = kind.of(np.full(10, context.rank + 1, np.float32))
        handle = hvd.allreduce_async_(array, op=hvd.Sum, name="both")
        if context.rank == 0:
            assert hvd.join() == 1
        else:
            alone = hvd.allreduce(kind.of(np.full(4, 7, np.float32)), op=hvd.Sum, name="one")
            np.testing.assert_array_equal(alone.read(), np.full(4, 7))
            hvd.join()
        np.testing.assert_array_equal(hvd.synchronize(handle).read(), np.full(10, 3))

    run_ranks(2, body)


def test_a_process_set_of_devices() -> None:
    hvd = binding_of(ExchangeArray)

    def body(context: Context) -> None:
        pair = hvd.add_process_set([0, 2])
        if context.rank != 1:
            mine = ExchangeArray.of(np.full(9, context.rank, np.float32), context.rank % 2)
            np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum, process_set=pair).read(), np.full(9, 2))
        hvd.barrier()

    run_ranks(3, body)


@every_kind
def test_a_tensor_on_a_device_and_one_on_the_cpu(kind: type[DeviceArray]) -> None:
    hvd = binding_of(kind)

    def body(context: Context) -> None:
        values = np.ones(5, np.float32)
        mine = values if context.rank == 1 else kind.of(values)
        other = farandole_numpy if context.rank == 1 else hvd
        with pytest.raises(MismatchError) as caught:
            other.allreduce(mine, name="x")
        assert str(caught.value) == (
            "'allreduce.x': device differs between ranks (ranks 0 and 2: CUDA tensor; rank 1: CPU tensor); "
            "give tensors on GPUs on every rank, or on the CPU"
        )
        np.testing.assert_array_equal(hvd.allreduce(kind.of(values), name="x", op=hvd.Sum).read(), np.full(5, 3))

    run_ranks(3, body)


def test_refusals_at_the_call() -> None:
    hvd = binding_of(ExchangeArray)

    def body(context: Context) -> None:
        mine = ExchangeArray.of(np.ones(5, np.float32))
        gate = load().stand_in_close(current_stream(0))
        first = hvd.allreduce_async_(mine, name="x")
        with pytest.raises(InvalidRequest, match="operation of the same name is still in flight"):
            hvd.allreduce_async_(mine, name="x")
        load().stand_in_open(gate)
        hvd.synchronize(first)
        far = ExchangeArray((5,), np.float32)
        far.device = 7
        with pytest.raises(InvalidRequest, match=r"'allreduce.y': .* lies on CUDA device 7, and this process sees 2"):
            hvd.allreduce_(far, name="y")
        far.device = 0

    run_ranks(1, body)


def test_a_device_that_fails() -> None:
    hvd = binding_of(ExchangeArray)

    def body(context: Context) -> None:
        mine = ExchangeArray.of(np.ones(5, np.float32))
        load().stand_in_fail(b"cuMemcpyHtoDAsync", 700, 0)
        try:
            with pytest.raises(FabricError, match=r"'allreduce.x': cuMemcpyHtoDAsync failed: CUDA_ERROR_ILLEGAL_"):
                hvd.allreduce_(mine, name="x")
        finally:
            load().stand_in_fail(b"cuMemcpyHtoDAsync", 0, 0)

    run_ranks(1, body)


def test_a_lost_rank_ends_the_waits() -> None:
    hvd = binding_of(ExchangeArray)

    def body(context: Context) -> None:
        if context.rank == 1:
            return
        with pytest.raises(PeerLost, match="rank 1 is lost"):
            hvd.allreduce(ExchangeArray.of(np.ones(5, np.float32)), name="x")

    run_ranks(2, body)


def test_shutdown_ends_what_waits_for_a_stream() -> None:
    hvd = binding_of(ExchangeArray)
    gates = []

    def body(context: Context) -> None:
        array = ExchangeArray.of(np.ones(5, np.float32))
        gates.append(load().stand_in_close(current_stream(0)))
        handle = hvd.allreduce_async_(array, name="x")
        context.shutdown()
        with pytest.raises(EngineClosed):
            hvd.synchronize(handle)
        load().stand_in_open(gates.pop())

    run_ranks(1, body)


def test_a_forked_child_is_refused() -> None:
    hvd = binding_of(ExchangeArray)

    def child(handle: object) -> int:
        for use in (hvd.poll, hvd.synchronize, lambda _: hvd.join()):
            try:
                use(handle)
            except InvalidRequest as refused:
                if "this process was forked from a rank" not in str(refused):
                    return 2
            else:
                return 3
        return 0

    def body(context: Context) -> None:
        mine = ExchangeArray.of(np.ones(5, np.float32))
        gate = load().stand_in_close(current_stream(0))
        handle = hvd.allreduce_async_(mine, name="x")
        pid = os.fork()
        if pid == 0:
            os._exit(child(handle))
        assert os.waitpid(pid, 0)[1] == 0
        load().stand_in_open(gate)
        hvd.synchronize(handle)

    run_ranks(1, body)


def test_memory_returns() -> None:
    hvd = binding_of(ExchangeArray)

    def body(context: Context) -> int:
        for step in range(20):
            mine = ExchangeArray.of(np.full(2000, step, np.float32))
            hvd.allreduce_(mine, name="x")
            hvd.allgather(mine, name="g").read()
        return int(load().stand_in_pinned())

    pinned, _ = run_ranks(2, body)
    assert pinned < 2 * 20 * 2000 * 4, "pinned memory is reused"
