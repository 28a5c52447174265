"""The collectives of a process group, asked for as torch asks, against what torch computes on one rank."""

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from farandole.config import Config
from farandole.core.context import Context
from farandole.errors import ConfigError, EngineClosed, InvalidRequest, MismatchError, RendezvousError
from farandole.torch.distributed.gloo import GlooGroup
from farandole.torch.distributed.group import FarandoleGroup
from farandole.torch.distributed.names import PERIOD
from farandole.torch.distributed.store import StoreRendezvous, address_seen
from helpers.ranks import run_ranks

SHORT = timedelta(seconds=30)

Body = Callable[[FarandoleGroup], object]


def in_group(size: int, body: Body, config: Config | None = None) -> list[object]:
    """Run `body(group)` on each of `size` ranks that meet at one store."""
    store = dist.HashStore()

    def rank(context: Context) -> object:
        met = StoreRendezvous(store, context.rank, context.size, secret=None, timeout=SHORT)
        group = FarandoleGroup(met, config or Config())
        try:
            return body(group)
        finally:
            group.shutdown()

    return run_ranks(size, rank)


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numbers = torch.arange(count) % 5 + rank + 1
    return numbers % 2 == 0 if dtype == torch.bool else numbers.to(dtype)


def of_all(size: int, count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [values(rank, count, dtype) for rank in range(size)]


def now(opts: object, **fields: object) -> object:
    """Options of an operation that torch waits for at once."""
    for name, value in {"asyncOp": False, **fields}.items():
        setattr(opts, name, value)
    return opts


SUM, AVG, MIN, MAX, PRODUCT = (getattr(dist.ReduceOp, each) for each in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"))
REDUCTIONS: dict[dist.ReduceOp, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    SUM: sum,
    AVG: lambda tensors: sum(tensors) / len(tensors),
    MIN: lambda tensors: reduce(torch.minimum, tensors),
    MAX: lambda tensors: reduce(torch.maximum, tensors),
    PRODUCT: lambda tensors: reduce(torch.mul, tensors),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_reductions(size: int, asynchronous: bool) -> None:
    def body(group: FarandoleGroup) -> None:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
            for op, expected in REDUCTIONS.items():
                if op == AVG and not dtype.is_floating_point:
                    continue
                everybody = of_all(size, 12, dtype)
                tensor = everybody[group.rank()].clone()
                work = group.allreduce([tensor], now(c10d.AllreduceOptions(), reduceOp=op, asyncOp=asynchronous))
                assert work.wait() and work.is_success()
                torch.testing.assert_close(tensor, expected(everybody).to(dtype))
                if 12 % size == 0:
                    part = torch.empty(12 // size, dtype=dtype)
                    opts = now(c10d.ReduceScatterOptions(), reduceOp=op, asyncOp=asynchronous)
                    group.reduce_scatter_single(part, everybody[group.rank()], opts).wait()
                    torch.testing.assert_close(part, expected(everybody).to(dtype).chunk(size)[group.rank()])

    in_group(size, body)


def test_reductions_of_truth_values_and_with_a_factor() -> None:
    def body(group: FarandoleGroup) -> None:
        rank = group.rank()
        both = of_all(2, 6, torch.bool)
        for op, expected in ((dist.ReduceOp.BAND, both[0] & both[1]), (dist.ReduceOp.BOR, both[0] | both[1])):
            tensor = both[rank].clone()
            group.allreduce([tensor], now(c10d.AllreduceOptions(), reduceOp=op)).wait()
            assert torch.equal(tensor, expected)
        tensor = values(rank, 6)
        group.allreduce([tensor], now(c10d.AllreduceOptions(), reduceOp=dist._make_nccl_premul_sum(0.5))).wait()
        assert torch.equal(tensor, sum(of_all(2, 6)) / 2)

    in_group(2, body)


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_operations_with_a_root(root: int, asynchronous: bool) -> None:
    def body(group: FarandoleGroup) -> None:
        rank, size = group.rank(), group.size()
        leads = rank == root
        fields = {"rootRank": root, "asyncOp": asynchronous}

        tensor = values(rank, 5)
        assert group.broadcast([tensor], now(c10d.BroadcastOptions(), **fields)).result()[0] is tensor
        assert torch.equal(tensor, values(root, 5))

        tensor = values(rank, 5)
        group.reduce([tensor], now(c10d.ReduceOptions(), **fields)).wait()
        assert torch.equal(tensor, sum(of_all(size, 5)) if leads else values(rank, 5))

        outputs = [torch.zeros(5) for _ in range(size)]
        group.gather([outputs] if leads else [], [values(rank, 5)], now(c10d.GatherOptions(), **fields)).wait()
        assert all(map(torch.equal, outputs, of_all(size, 5) if leads else [torch.zeros(5)] * size))

        output = torch.zeros(5)
        opts = now(c10d.ScatterOptions(), **fields)
        group.scatter([output], [of_all(size, 5)] if leads else [], opts).wait()
        assert torch.equal(output, values(rank, 5))

    in_group(3, body)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_movement(size: int, asynchronous: bool) -> None:
    def body(group: FarandoleGroup) -> None:
        rank = group.rank()
        opts = now(c10d.AllgatherOptions(), asyncOp=asynchronous)
        expected = torch.stack(of_all(size, 4)).view(size, 2, 2)

        whole = torch.empty(size, 2, 2)
        group.all_gather_single(whole, values(rank, 4).view(2, 2), opts).wait()
        assert torch.equal(whole, expected)
        for outputs in ([torch.empty(2, 2) for _ in range(size)], list(torch.empty(size, 2, 2).unbind())):
            group.allgather([outputs], [values(rank, 4).view(2, 2)], opts).wait()
            assert torch.equal(torch.stack(outputs), expected)
        unequal = [torch.empty(peer + 1) for peer in range(size)]
        group.allgather([unequal], [values(rank, rank + 1)], opts).wait()
        assert all(torch.equal(got, values(peer, peer + 1)) for peer, got in enumerate(unequal))

        # Rank r sends s + 1 rows, full of r, to rank s.
        opts = now(c10d.AllToAllOptions(), asyncOp=asynchronous)
        sent, came = [peer + 1 for peer in range(size)], [rank + 1] * size
        output = torch.empty(sum(came), 2)
        group.all_to_all_single(output, torch.full((sum(sent), 2), float(rank)), came, sent, opts).wait()
        assert torch.equal(output[:, 1], torch.arange(float(size)).repeat_interleave(rank + 1))
        even = torch.empty(size, dtype=torch.int32)
        group.all_to_all_single(even, torch.full((size,), rank, dtype=torch.int32), [], [], opts).wait()
        assert torch.equal(even, torch.arange(size, dtype=torch.int32))
        outputs = [torch.empty(rank + 1) for _ in range(size)]
        group.alltoall(outputs, [torch.full((peer + 1,), float(rank)) for peer in range(size)], opts).wait()
        assert all(torch.equal(got, torch.full((rank + 1,), float(peer))) for peer, got in enumerate(outputs))

        output = torch.empty(4)
        parts = [values(rank, 4) + peer for peer in range(size)]
        group.reduce_scatter([output], [parts], now(c10d.ReduceScatterOptions(), asyncOp=asynchronous)).wait()
        assert torch.equal(output, sum(of_all(size, 4)) + size * rank)
        assert group.barrier(now(c10d.BarrierOptions(), asyncOp=asynchronous)).wait()

    in_group(size, body)


def test_a_part_may_lie_in_its_place_in_the_whole_and_nowhere_else() -> None:
    def body(group: FarandoleGroup) -> None:
        rank = group.rank()
        whole = torch.zeros(6)
        mine = whole.chunk(2)[rank]
        mine.copy_(values(rank, 3))
        group.all_gather_single(whole, mine).wait()
        assert torch.equal(whole, torch.cat(of_all(2, 3)))
        group.reduce_scatter_single(mine, whole).wait()
        assert torch.equal(mine, 2 * values(rank, 3))
        elsewhere = whole[1:4]
        for ask in (group.all_gather_single, lambda output, input: group.reduce_scatter_single(input, output)):
            with pytest.raises(InvalidRequest, match="overlaps the input"):
                ask(whole, elsewhere)
        with pytest.raises(InvalidRequest, match="overlaps the input"):
            group.all_to_all_single(whole, whole, [], [])

    in_group(2, body)


def test_several_at_once() -> None:
    def body(group: FarandoleGroup) -> None:
        rank = group.rank()
        for asynchronous in (False, True):
            tensors = [values(rank, 3), values(rank, 4, torch.float64)]
            group.allreduce_coalesced(tensors, now(c10d.AllreduceCoalescedOptions(), asyncOp=asynchronous)).wait()
            assert torch.equal(tensors[0], sum(of_all(2, 3)))
            assert torch.equal(tensors[1], sum(of_all(2, 4, torch.float64)))
            whole = values(rank, 300_000)
            shared = [whole, whole[1000:], whole]
            group.allreduce_coalesced(shared, now(c10d.AllreduceCoalescedOptions(), asyncOp=asynchronous)).wait()
            assert torch.equal(whole, sum(of_all(2, 300_000)))
            outputs = [torch.empty(6), torch.empty(8)]
            opts = now(c10d.AllgatherOptions(), asyncOp=asynchronous)
            work = group.all_gather_single_coalesced(outputs, [values(rank, 3), values(rank, 4)], opts)
            assert work.result() == outputs
            assert torch.equal(outputs[1], torch.cat(of_all(2, 4)))
            lists = [[torch.empty(3), torch.empty(2, 2)] for _ in range(2)]
            group.allgather_coalesced(lists, [values(rank, 3), values(rank, 4).view(2, 2)], opts).wait()
            assert torch.equal(lists[1][0], values(1, 3))
            assert torch.equal(lists[0][1], values(0, 4).view(2, 2))
            outputs = [torch.empty(3), torch.empty(2)]
            opts = now(c10d.ReduceScatterOptions(), asyncOp=asynchronous)
            group.reduce_scatter_single_coalesced(outputs, [values(rank, 6), values(rank, 4)], opts).wait()
            assert torch.equal(outputs[0], sum(of_all(2, 6)).chunk(2)[rank])

    in_group(2, body)


def test_dtypes_that_cannot_be_reduced_are_moved() -> None:
    def body(group: FarandoleGroup) -> None:
        small = torch.tensor([1.5, -2.0, 0.25]).to(torch.float8_e4m3fn)
        output = torch.empty(6, dtype=torch.float8_e4m3fn)
        group.all_gather_single(output, small).wait()
        assert torch.equal(output.view(torch.uint8), torch.cat([small, small]).view(torch.uint8))
        with pytest.raises(InvalidRequest, match=r"all_reduce.*not supported"):
            group.allreduce([small])

    in_group(2, body)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_reductions_of_complex_numbers(dtype: torch.dtype, asynchronous: bool) -> None:
    size = 2

    def of(rank: int) -> torch.Tensor:
        rows = torch.arange(8.0).view(4, 2)
        return torch.complex(rows + rank, rank - 2 * rows).to(dtype)

    def body(group: FarandoleGroup) -> None:
        rank = group.rank()
        for op, divisor in ((SUM, 1), (AVG, size)):
            fields = {"reduceOp": op, "asyncOp": asynchronous}
            whole = ((of(0).to(torch.complex128) + of(1).to(torch.complex128)) / divisor).to(dtype)
            for tensor in (of(rank), of(rank).t().contiguous().t(), of(rank).conj().resolve_conj().conj()):
                group.allreduce([tensor], now(c10d.AllreduceOptions(), **fields)).wait()
                assert torch.equal(tensor.resolve_conj(), whole)
            tensor = of(rank)
            result = group.reduce([tensor], now(c10d.ReduceOptions(), rootRank=1, **fields)).result()[0]
            assert torch.equal(result, whole if rank == 1 else of(rank)) and result is tensor
            several = [values(rank, 3), of(rank)]
            group.allreduce_coalesced(several, now(c10d.AllreduceCoalescedOptions(), **fields)).wait()
            assert torch.equal(several[1], whole)
            for strided in (False, True):
                part = torch.empty(2, 2, dtype=dtype)
                part = part.t() if strided else part
                group.reduce_scatter_single(part, of(rank), now(c10d.ReduceScatterOptions(), **fields)).wait()
                assert torch.equal(part, whole.chunk(size)[rank])
            for parts in (list(of(rank).chunk(size)), [each.clone() for each in of(rank).chunk(size)]):
                part = torch.empty(2, 2, dtype=dtype)
                group.reduce_scatter([part], [parts], now(c10d.ReduceScatterOptions(), **fields)).wait()
                assert torch.equal(part, whole.chunk(size)[rank])

    in_group(size, body)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0, 3)])
def test_single_elements_and_none_of_any_stride_are_moved(shape: tuple[int, ...]) -> None:
    def body(group: FarandoleGroup) -> None:
        def every_other(values: torch.Tensor) -> torch.Tensor:
            view = values.new_empty((*shape, 2))[..., 0] if group.rank() else values.new_empty(shape)
            return view.copy_(values)

        everybody = [torch.full(shape, complex(rank, 1), dtype=torch.complex128) for rank in range(2)]
        tensor = every_other(everybody[group.rank()])
        outputs = [every_other(torch.zeros_like(tensor)) for _ in range(2)]
        group.allgather([outputs], [tensor]).wait()
        assert all(map(torch.equal, outputs, everybody))
        group.broadcast([tensor], now(c10d.BroadcastOptions(), rootRank=1)).wait()
        assert torch.equal(tensor, everybody[1])

    in_group(2, body)


def test_more_under_way_than_there_are_names() -> None:
    def body(group: FarandoleGroup) -> None:
        tensors = [torch.full((10,), float(each + group.rank())) for each in range(5 * PERIOD)]
        futures = [group.allreduce([tensor]).get_future() for tensor in tensors]
        seen = threading.Event()
        last = futures[-1].then(lambda future: (seen.set(), future.value()[0] * 2)[1])
        assert torch.equal(last.wait(), torch.full((10,), 2.0 * (10 * PERIOD - 1)))
        assert seen.is_set()
        for each, tensor in enumerate(tensors):
            assert torch.equal(tensor, torch.full((10,), 2.0 * each + 1))

    in_group(2, body)


@pytest.mark.parametrize("waits", ["for a future", "with a limit"])
def test_a_callback_waits_for_a_collective_of_its_own(waits: str) -> None:
    """Callbacks of PowerSGD's hook for DDP do."""

    attached = threading.Event()

    def body(group: FarandoleGroup) -> None:
        def again(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            work = group.allreduce([future.value()])
            if waits == "for a future":
                return work.get_future().wait()[0]
            assert work.wait(SHORT)
            return work.result()[0]

        if group.rank() == 1:  # so that rank 0's callbacks run on the thread that completes futures
            assert attached.wait(SHORT.total_seconds())
        future = group.allreduce([torch.ones(3)]).get_future()
        last = future.then(lambda future: future.value()[0]).then(again).then(again)
        attached.set()
        assert torch.equal(last.wait(), torch.full((3,), 8.0))

    in_group(2, body)


def test_ranks_that_differ_hear_so_and_can_go_on() -> None:
    def body(group: FarandoleGroup) -> None:
        for opts in (now(c10d.AllreduceOptions()), None):
            with pytest.raises(MismatchError, match=r"all_reduce of float32\[[34]\].*rank 0: float32\[3\]"):
                group.allreduce([torch.ones(3 + group.rank())], opts).wait()
        other = group.broadcast([torch.ones(3)], c10d.BroadcastOptions()) if group.rank() else group.barrier()
        with pytest.raises(MismatchError, match="broadcast"):
            other.wait()
        assert isinstance(other.exception(), MismatchError)
        with pytest.raises(RuntimeError, match="MismatchError"):
            other.get_future().wait()
        tensor = torch.ones(3)
        group.allreduce([tensor]).wait()
        assert torch.equal(tensor, torch.full((3,), 2.0))

    in_group(2, body)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_strided_tensors(asynchronous: bool) -> None:
    mine, other = values(0, 12).view(2, 3, 2, 1), values(1, 12).view(2, 3, 2, 1)

    def body(group: FarandoleGroup) -> None:
        rank, fields = group.rank(), {"asyncOp": asynchronous}

        def strided(values: torch.Tensor) -> torch.Tensor:
            # The ranks' strides differ.
            return (
                values.to(memory_format=torch.channels_last) if rank else values.transpose(0, 1).clone().transpose(0, 1)
            )

        tensor, whole = strided((mine, other)[rank]), (mine, other)[rank].clone()
        work = group.allreduce([tensor], now(c10d.AllreduceOptions(), **fields))
        assert work.wait() and work.result()[0] is tensor
        assert torch.equal(tensor, mine + other)
        pair = [strided((mine, other)[rank]), whole]
        future = group.allreduce_coalesced(pair, now(c10d.AllreduceCoalescedOptions(), **fields)).get_future()
        assert future.wait()[0] is pair[0] and all(torch.equal(each, mine + other) for each in pair)

        tensor = strided((mine, other)[rank])
        group.broadcast([tensor], now(c10d.BroadcastOptions(), rootRank=1, **fields)).wait()
        assert torch.equal(tensor, other)
        tensor = strided((mine, other)[rank]) if rank else mine[:1].expand(2, 3, 2, 1)
        group.reduce([tensor], now(c10d.ReduceOptions(), rootRank=1, **fields)).wait()
        assert torch.equal(tensor, mine[:1] + other if rank else mine[:1].expand(2, 3, 2, 1))

        tensor = strided((mine, other)[rank])
        outputs = [strided(torch.zeros_like(mine)), torch.zeros_like(mine)]
        group.allgather([outputs], [tensor], now(c10d.AllgatherOptions(), **fields)).wait()
        assert all(map(torch.equal, outputs, (mine, other)))
        lists = [[strided(torch.zeros_like(mine)), torch.zeros(2)] for _ in range(2)]
        inputs = [tensor, values(rank, 2)]
        group.allgather_coalesced(lists, inputs, now(c10d.AllgatherOptions(), **fields)).wait()
        assert all(map(torch.equal, (lists[0][0], lists[1][0]), (mine, other)))
        assert all(map(torch.equal, (lists[0][1], lists[1][1]), of_all(2, 2)))
        joined = torch.empty(3, 4, 2, 1).transpose(0, 1)
        group.all_gather_single(joined, tensor, now(c10d.AllgatherOptions(), **fields)).wait()
        assert torch.equal(joined, torch.cat([mine, other]))
        part = torch.empty(3, 1, 2, 1).transpose(0, 1)
        group.reduce_scatter_single(part, tensor, now(c10d.ReduceScatterOptions(), **fields)).wait()
        assert torch.equal(part, (mine + other)[rank : rank + 1])
        output = strided(torch.zeros_like(mine))
        group.all_to_all_single(output, tensor, [], [], now(c10d.AllToAllOptions(), **fields)).wait()
        assert torch.equal(output, torch.stack([mine[rank], other[rank]]))
        complex_ = torch.complex(tensor, tensor).transpose(0, 1)
        group.broadcast([complex_], now(c10d.BroadcastOptions(), rootRank=0, **fields)).wait()
        assert torch.equal(complex_, torch.complex(mine, mine).transpose(0, 1))

    in_group(2, body)


def test_outputs_that_do_not_fit_what_comes() -> None:
    def body(group: FarandoleGroup) -> None:
        rank = group.rank()
        # Rank 0 has room for one row of each rank; rank 1 sends two.
        work = group.all_to_all_single(torch.empty(2), torch.ones(3 if rank else 2), [1, 1], [2, 1] if rank else [1, 1])
        if rank == 0:
            with pytest.raises(InvalidRequest, match=r"all_to_all.*12 bytes and the output 8"):
                work.wait()
        else:
            work.wait()
        group.barrier().wait()

    in_group(2, body)


REFUSED: dict[str, tuple[Callable[[FarandoleGroup], object], str]] = {
    "sparse": (lambda group: group.reduce([torch.eye(2).to_sparse()], now(c10d.ReduceOptions())), "reduce.*sparse"),
    "expanded bytes": (
        lambda group: group.broadcast([torch.ones(1, dtype=torch.complex64).expand(4)], now(c10d.BroadcastOptions())),
        "broadcast.*share memory",
    ),
    "expanded": (lambda group: group.allreduce([torch.ones(4).expand(4, 4)]), "all_reduce.*share memory"),
    "elsewhere": (lambda group: group.allreduce([torch.ones(2, device="meta")]), "on meta"),
    "two": (lambda group: group.allreduce([torch.ones(2), torch.ones(2)]), "one tensor of each rank, got 2"),
    "bits": (
        lambda group: group.allreduce([torch.ones(2)], now(c10d.AllreduceOptions(), reduceOp=dist.ReduceOp.BXOR)),
        "BXOR of torch.float32 is not supported; use SUM",
    ),
    "complex": (
        lambda group: group.reduce(
            [torch.ones(2, dtype=torch.complex64)], now(c10d.ReduceOptions(), reduceOp=dist.ReduceOp.MAX)
        ),
        "reduce.*MAX of torch.complex64 is not supported; use SUM",
    ),
    "one of several complex": (
        lambda group: group.allreduce_coalesced(
            [torch.ones(2), torch.ones(2, dtype=torch.complex64)],
            now(c10d.AllreduceCoalescedOptions(), reduceOp=dist.ReduceOp.PRODUCT),
        ),
        "all_reduce_coalesced.*PRODUCT of torch.complex64 is not supported",
    ),
    "split": (lambda group: group.split_group([0]), "split_group.*use new_group"),
    "merged": (lambda group: group.merge_remote_group(dist.HashStore(), 1), "merge_remote_group.*use new_group"),
    "send": (lambda group: group.send([torch.ones(2)], 0, 0), "there is no other rank 0"),
    "recv": (lambda group: group.recv([torch.ones(2)], 1, 0), "there is no other rank 1; ranks are 0 to 0"),
    "any": (lambda group: group.recv_anysource([torch.ones(2)], 0), "there is no other rank"),
    "gather": (lambda group: group.all_gather_single(torch.empty(5), torch.ones(2)), "5 elements.*not 1 times the 2"),
    "scatter": (lambda group: group.reduce_scatter_single(torch.empty(2), torch.ones(3)), "3 elements"),
    "list": (lambda group: group.allgather([[torch.empty(5)]], [torch.ones(2)]), "as large as that rank's input"),
    "parts": (lambda group: group.reduce_scatter([torch.empty(2)], [[torch.ones(3)]]), "as many elements"),
    "splits": (
        lambda group: group.all_to_all_single(torch.empty(2), torch.ones(2), [2], [1]),
        r"the input has 2 rows for 1 ranks, which split sizes \[1\]",
    ),
    "lists": (lambda group: group.alltoall([], [torch.ones(2)]), "one tensor for each of the 1 ranks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_at_the_call(case: str) -> None:
    ask, problem = REFUSED[case]

    def body(group: FarandoleGroup) -> None:
        with pytest.raises(InvalidRequest, match=problem):
            ask(group)
        assert group.barrier().wait()

    in_group(1, body)


def test_a_wait_with_a_time_limit() -> None:
    gone = threading.Event()

    def body(group: FarandoleGroup) -> None:
        tensor = torch.ones(2)
        if group.rank() == 0:
            work = group.allreduce([tensor])
            with pytest.raises(TimeoutError, match=r"not done after 0:00:00.05"):
                work.wait(timedelta(milliseconds=50))
            gone.set()
            assert work.wait(SHORT)
        else:
            assert gone.wait(30)
            group.allreduce([tensor]).wait()
        assert torch.equal(tensor, torch.full((2,), 2.0))

    in_group(2, body)


def test_what_is_under_way_when_a_rank_leaves_fails() -> None:
    def body(group: FarandoleGroup) -> None:
        if group.rank() == 0:
            future = group.allreduce([torch.ones(2)]).get_future()
            with pytest.raises(RuntimeError, match="rank 1"):
                future.wait()
        group.shutdown()
        with pytest.raises(EngineClosed):
            group.barrier().wait()

    in_group(2, body)


def test_autograd_hears_of_results() -> None:
    def body(group: FarandoleGroup) -> None:
        weight = torch.ones(2, requires_grad=True)
        factor = torch.ones(2)
        loss = (weight * factor).sum()
        group.allreduce([factor]).wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        group.broadcast([weight], c10d.BroadcastOptions()).wait()  # of a parameter, as programs do
        with torch.inference_mode():
            group.allreduce([torch.ones(2)]).wait()

    in_group(1, body)


@pytest.mark.parametrize(
    ("addresses", "seen"),
    [
        ([None, None], [None, None]),
        (["127.0.0.1:4", "127.0.0.1:4"], [None, None]),
        (["127.0.1.1:4", "10.0.0.1:4"], ["10.0.0.1:4", "10.0.0.1:4"]),
        (["10.0.0.1:4", "10.1.0.1:4"], ["10.0.0.1:4", "10.1.0.1:4"]),
        (["[::1]:4", "[fd00::1]:4"], ["[fd00::1]:4", "[fd00::1]:4"]),
    ],
)
def test_a_loopback_address_is_no_address(addresses: list[str | None], seen: list[str | None]) -> None:
    assert [address_seen(rank, addresses) for rank in range(2)] == seen


def test_ranks_meet_again_at_the_same_store() -> None:
    store = dist.HashStore()

    def body(context: Context) -> tuple[list[int], list[bytes], list[list[bytes]]]:
        generations, secrets, payloads = [], [], []
        for _ in range(2):
            met = StoreRendezvous(store, context.rank, context.size, secret=b"job", timeout=SHORT)
            generations.append(met.generation)
            secrets.append(met.secret)
            payloads += [met.allgather(b"%d" % context.rank, timeout=SHORT), met.allgather(b"", timeout=SHORT)]
        return generations, secrets, payloads

    first, second = run_ranks(2, body)
    assert first == second
    generations, secrets, payloads = first
    assert generations == [0, 1]
    assert secrets[0] != secrets[1]
    assert payloads == [[b"0", b"1"], [b"", b""]] * 2


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_who_does_not_come_is_named(kind: str, tmp_path: Path) -> None:
    store = dist.HashStore() if kind == "memory" else dist.FileStore(str(tmp_path / "store"), 3)
    with pytest.raises(RendezvousError, match="missing: ranks 1 and 2"):
        StoreRendezvous(store, 0, 3, secret=None, timeout=timedelta(milliseconds=50))


def test_a_compiled_program_runs_collectives_as_written() -> None:
    def body(group: FarandoleGroup) -> None:
        @torch.compiler.disable(recursive=False)  # as the functions of torch.distributed are
        def doubled(tensor: torch.Tensor) -> torch.Tensor:
            works = [group.allreduce([tensor]), group.broadcast([tensor.view(1, 3).t()], c10d.BroadcastOptions())]
            assert all(work.wait() and work.is_success() for work in works)
            return tensor * 2

        compiled = torch.compile(lambda tensor: doubled(tensor + 1) - 1, backend="eager")
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))

    in_group(1, body)


def test_checkpoints_find_the_cpu() -> None:
    def body(context: Context) -> None:
        dist.init_process_group("farandole", store=dist.HashStore(), rank=0, world_size=1)
        try:
            assert "cpu" in c10d._device_capability(dist.group.WORLD)
            assert c10d._get_object_coll_device(dist.group.WORLD) == "cpu"
        finally:
            dist.destroy_process_group()

    run_ranks(1, body, how="processes")


def test_a_group_has_no_devices_while_torch_makes_it() -> None:
    """torch 2.15 would add its flight recorder, which needs a backend of C++."""

    def body(group: FarandoleGroup) -> None:
        assert group._device_types == []
        assert group.get_backend(torch.device("cpu")) is group

    in_group(1, body)


def test_a_group_in_the_place_of_gloo_takes_the_arguments_of_torch_2_15() -> None:
    arguments = dist.HashStore(), 0, 1, SHORT
    GlooGroup(*arguments, enable_reconfigure=False).shutdown()
    with pytest.raises(ConfigError, match="enable_reconfigure: only gloo itself has it"):
        GlooGroup(*arguments, enable_reconfigure=True)
