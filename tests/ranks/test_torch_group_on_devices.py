"""CUDA tensors in a process group: on a stand-in for CUDA, and on a GPU where there is one, which the ranks share."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from farandole.config import Config
from farandole.core.context import Context
from farandole.errors import MismatchError
from farandole.torch.distributed import streams, work
from farandole.torch.distributed.group import FarandoleGroup
from farandole.torch.distributed.store import StoreRendezvous
from helpers.device_arrays import current_stream
from helpers.device_tensors import DeviceTensor, StandInFuture, stand_in_for_torch_cuda
from helpers.ranks import run_ranks
from helpers.stand_in_cuda import load

Make = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=["stand-in", *(["cuda"] if torch.cuda.is_available() else [])])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return the function that puts a tensor on the device."""
    if request.param == "cuda":
        return lambda values: values.to("cuda")
    load()
    monkeypatch.setattr(streams, "cuda", stand_in_for_torch_cuda)
    monkeypatch.setattr(work, "new_future", lambda gpus: StandInFuture(gpus) if gpus else torch.futures.Future())
    return DeviceTensor.of


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values after the work that is in this thread's stream."""
    return tensor.read() if isinstance(tensor, DeviceTensor) else tensor.cpu()


def in_group(size: int, body: Callable[[FarandoleGroup, int], None]) -> None:
    store = dist.HashStore()

    def rank(context: Context) -> None:
        met = StoreRendezvous(store, context.rank, context.size, secret=None, timeout=timedelta(seconds=30))
        group = FarandoleGroup(met, Config())
        try:
            body(group, context.rank)
        finally:
            group.shutdown()

    run_ranks(size, rank)


def values(rank: int, count: int) -> torch.Tensor:
    return (torch.arange(count) % 5 + rank + 1).float()


def of_all(size: int, count: int) -> list[torch.Tensor]:
    return [values(rank, count) for rank in range(size)]


def options(kind: Any, **fields: object) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_registered_for_cuda() -> None:
    import farandole.torch.distributed  # noqa: F401  # it registers

    pair = {"cpu": "farandole", "cuda": "farandole"}
    for spelled in ("farandole", "cpu:farandole,cuda:farandole"):
        assert c10d.BackendConfig(dist.Backend(spelled)).device_backend_map == pair


@pytest.mark.parametrize("asynchronous", [False, True])
def test_reductions_and_broadcasts(make: Make, asynchronous: bool) -> None:
    size = 2

    def body(group: FarandoleGroup, rank: int) -> None:
        tensor = make(values(rank, 1000))
        opts = options(c10d.AllreduceOptions, asyncOp=asynchronous)
        for step in range(3):
            assert group.allreduce([tensor], opts).wait()
            assert torch.equal(on_cpu(tensor), sum(of_all(size, 1000)) * 2**step)
        tensors = [make(values(rank, 3)), make(values(rank, 4).bfloat16())]
        group.allreduce_coalesced(tensors, options(c10d.AllreduceCoalescedOptions, asyncOp=asynchronous)).wait()
        assert torch.equal(on_cpu(tensors[1]), sum(of_all(size, 4)).bfloat16())

        tensor = make(values(rank, 5))
        group.broadcast([tensor], options(c10d.BroadcastOptions, rootRank=1, asyncOp=asynchronous)).wait()
        assert torch.equal(on_cpu(tensor), values(1, 5))
        tensor = make(values(rank, 5))
        group.reduce([tensor], options(c10d.ReduceOptions, rootRank=1, asyncOp=asynchronous)).wait()
        assert torch.equal(on_cpu(tensor), sum(of_all(size, 5)) if rank == 1 else values(0, 5))

        for op, want in ((dist.ReduceOp.SUM, sum(of_all(size, 6))), (dist.ReduceOp.MIN, values(0, 6))):
            part = make(torch.zeros(3))
            opts = options(c10d.ReduceScatterOptions, reduceOp=op, asyncOp=asynchronous)
            group.reduce_scatter_single(part, make(values(rank, 6)), opts).wait()
            assert torch.equal(on_cpu(part), want.chunk(size)[rank])

    in_group(size, body)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_movement(make: Make, asynchronous: bool) -> None:
    size = 2

    def body(group: FarandoleGroup, rank: int) -> None:
        opts = options(c10d.AllgatherOptions, asyncOp=asynchronous)
        whole = make(torch.zeros(size * 4))
        group.all_gather_single(whole, make(values(rank, 4)), opts).wait()
        assert torch.equal(on_cpu(whole), torch.cat(of_all(size, 4)))
        outputs = [make(torch.zeros(peer + 1)) for peer in range(size)]
        group.allgather([outputs], [make(values(rank, rank + 1))], opts).wait()
        assert all(torch.equal(on_cpu(got), values(peer, peer + 1)) for peer, got in enumerate(outputs))
        adjacent = list(make(torch.zeros(size, 4)).unbind())
        group.allgather([adjacent], [make(values(rank, 4))], opts).wait()
        assert all(torch.equal(on_cpu(got), values(peer, 4)) for peer, got in enumerate(adjacent))

        opts = options(c10d.AllToAllOptions, asyncOp=asynchronous)
        output = make(torch.zeros(size))
        group.all_to_all_single(output, make(torch.full((size,), float(rank))), [], [], opts).wait()
        assert torch.equal(on_cpu(output), torch.arange(float(size)))
        outputs = [make(torch.zeros(rank + 1)) for _ in range(size)]
        sent = [make(torch.full((peer + 1,), float(rank))) for peer in range(size)]
        group.alltoall(outputs, sent, opts).wait()
        assert all(torch.equal(on_cpu(got), torch.full((rank + 1,), float(peer))) for peer, got in enumerate(outputs))
        for root in range(size):
            leads = rank == root
            fields = {"rootRank": root, "asyncOp": asynchronous}
            got = [make(torch.zeros(3)) for _ in range(size)]
            group.gather([got] if leads else [], [make(values(rank, 3))], options(c10d.GatherOptions, **fields)).wait()
            assert all(map(torch.equal, map(on_cpu, got), of_all(size, 3) if leads else [torch.zeros(3)] * size))
            output, given = make(torch.zeros(3)), [make(each) for each in of_all(size, 3)]
            group.scatter([output], [given] if leads else [], options(c10d.ScatterOptions, **fields)).wait()
            assert torch.equal(on_cpu(output), values(rank, 3))
        part = make(torch.zeros(4))
        inputs = [make(values(rank, 4) + peer) for peer in range(size)]
        group.reduce_scatter([part], [inputs], options(c10d.ReduceScatterOptions, asyncOp=asynchronous)).wait()
        assert torch.equal(on_cpu(part), sum(of_all(size, 4)) + size * rank)

    in_group(size, body)


def test_futures_as_ddp_uses_them(make: Make) -> None:
    def body(group: FarandoleGroup, rank: int) -> None:
        tensors = [make(torch.full((2000,), float(each + rank))) for each in range(10)]
        futures = [group.allreduce([tensor]).get_future() for tensor in tensors]
        halves = [future.then(lambda done: [each.mul_(0.5) for each in done.value()]) for future in futures]
        for each, future in enumerate(halves):
            assert torch.equal(on_cpu(future.wait()[0]), torch.full((2000,), each + 0.5))
        done = group.allreduce([tensors[0]], options(c10d.AllreduceOptions, asyncOp=False)).get_future()
        assert torch.equal(on_cpu(done.wait()[0]), torch.full((2000,), 1.0))

    in_group(2, body)


def test_each_thread_that_waits_comes_after_the_result(make: Make) -> None:
    def body(group: FarandoleGroup, rank: int) -> None:
        for _ in range(5):
            outputs = [make(torch.zeros(peer + 999)) for peer in range(2)]
            work = group.allgather([outputs], [make(values(rank, rank + 999))])
            seen: list[torch.Tensor] = []

            def wait(work: dist.Work, outputs: list[torch.Tensor], seen: list[torch.Tensor]) -> None:
                work.wait(timedelta(seconds=30))  # the group's own thread waits first
                seen.extend([on_cpu(output) for output in outputs])

            others = [threading.Thread(target=wait, args=(work, outputs, seen)) for _ in range(2)]
            for other in others:
                other.start()
            for other in others:
                other.join()
            assert [torch.equal(got, values(place % 2, place % 2 + 999)) for place, got in enumerate(seen)] == [
                True
            ] * 4

    in_group(2, body)


def test_a_call_waits_neither_for_the_device_nor_for_the_others(make: Make) -> None:
    if not isinstance(make(torch.ones(1)), DeviceTensor):
        pytest.skip("the stand-in's streams can be stopped")

    def body(group: FarandoleGroup, rank: int) -> None:
        tensor = make(torch.ones(10))
        gate = load().stand_in_close(current_stream(0))
        try:
            work = group.allreduce([tensor])
            assert not work.is_completed()
        finally:
            load().stand_in_open(gate)
        work.wait()
        assert torch.equal(on_cpu(tensor), torch.full((10,), 2.0))

    in_group(2, body)


def test_a_cuda_tensor_on_one_rank_only(make: Make) -> None:
    def body(group: FarandoleGroup, rank: int) -> None:
        tensor = make(torch.ones(3)) if rank == 0 else torch.ones(3)
        with pytest.raises(MismatchError, match="device differs between ranks"):
            group.allreduce([tensor]).wait()

    in_group(2, body)


def test_a_later_wait_comes_behind_what_the_first_one_finished(make: Make) -> None:
    tensor = make(torch.zeros(4))
    if not isinstance(tensor, DeviceTensor):
        pytest.skip("the stand-in's streams can be stopped")
    assert torch.equal(tensor.read(), torch.zeros(4))
    gates = []

    def finish() -> None:
        gates.append(load().stand_in_close(current_stream(0)))
        tensor.block.write(torch.ones(4).view(torch.uint8))

    underway = work.Underway([], [tensor], lambda error: error, finish)
    with streams.SideStreams().current(underway.gpus):
        underway.wait()
    underway.wait()
    opener = threading.Timer(0.2, load().stand_in_open, gates)
    opener.start()
    assert torch.equal(tensor.read(), torch.ones(4))
    opener.join()
