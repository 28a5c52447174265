"""Messages between two ranks of a process group, and what is made of them and of allgathers, as torch asks for it."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import reduce

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from farandole.config import Config
from farandole.core.context import Context
from farandole.errors import CollectiveTimeout, InvalidRequest, MismatchError, PeerLost
from farandole.torch.distributed.group import FarandoleGroup
from farandole.torch.distributed.store import StoreRendezvous
from helpers.ranks import run_ranks

SHORT = timedelta(seconds=30)
ANY = -1

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


@pytest.mark.parametrize("count", [0, 3, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_a_ring_of_messages(count: int, dtype: torch.dtype) -> None:
    def body(group: FarandoleGroup) -> None:
        rank, size = group.rank(), group.size()
        sent, received = torch.full((2, count), rank + 1).to(dtype), torch.zeros(2, count).to(dtype)
        works = [group.send([sent], (rank + 1) % size, 7), group.recv([received], (rank - 1) % size, 7)]
        for work in works:
            assert work.wait()
        assert torch.equal(received, torch.full((2, count), (rank - 1) % size + 1).to(dtype))

    in_group(3, body)


def test_tags_any_source_and_strides() -> None:
    def body(group: FarandoleGroup) -> None:
        rank = group.rank()
        if rank == 0:
            column = torch.zeros(4, 2)
            group.recv([column[:, 1]], 2, 5).wait()  # passes over the message that came before
            assert column.tolist() == [[0, 2]] * 4
            heard = {}
            for _ in range(2):
                one = torch.zeros(1, dtype=torch.int64)
                work = group.recv_anysource([one], 1)
                work.wait()
                heard[work._source_rank()] = int(one)
            assert heard == {1: 10, 2: 20}
            return
        group.send([torch.tensor([10 * rank])], 0, 1).wait()
        if rank == 2:
            group.send([torch.full((4, 3), 2.0)[:, 0]], 0, 5).wait()

    in_group(3, body)


def test_messages_between_hosts() -> None:
    store = dist.HashStore()

    def rank(context: Context) -> None:
        met = StoreRendezvous(store, context.rank, context.size, secret=None, timeout=SHORT)
        with Context(met, Config(), host=f"host {context.rank % 2}", transfers=True) as own:
            for count in (5, 500_000):
                out, into = torch.full((count,), float(own.rank)), torch.empty(count)
                to, source = (own.rank + 1) % own.size, (own.rank - 1) % own.size
                parts = [own.engine.start_transfer(True, "send", out, to, 0)]
                parts.append(own.engine.start_transfer(False, "recv", into, ANY, 0))
                for part in parts:
                    part.wait()
                assert parts[1].source() == source
                assert (into == source).all()

    run_ranks(3, rank)


def test_errors_name_operation_ranks_and_sizes() -> None:
    def body(group: FarandoleGroup) -> None:
        with pytest.raises(InvalidRequest, match="there is no other rank 9; ranks are 0 to 1"):
            group.send([torch.ones(2)], 9, 0)
        for tag in (-1, 1 << 31):
            with pytest.raises(InvalidRequest, match=rf"'send': tags are 0 to 2147483647, got {tag}"):
                group.send([torch.ones(2)], 1 - group.rank(), tag)
        if group.rank() == 0:
            group.send([torch.ones(3)], 1, 4).wait()
            with pytest.raises(MismatchError, match=r"send with tag 4 of float32\[50000\]': size differs"):
                group.send([torch.ones(50_000)], 1, 4).wait()
            with pytest.raises(PeerLost, match="rank 1"):
                group.recv([torch.ones(1)], 1, 4).wait()
        else:
            for count in (2, 49_999):
                with pytest.raises(MismatchError, match=rf"recv with tag 4 of float32\[{count}\]': size differs"):
                    group.recv([torch.ones(count)], 0, 4).wait()

    in_group(2, body)


def test_collectives_go_on_after_a_message_of_another_size() -> None:
    """Only the receiver sees the error, so it must not change the names of its collectives."""

    def body(group: FarandoleGroup) -> None:
        group.allreduce([torch.ones(2)]).wait()
        if group.rank() == 0:
            group.send([torch.ones(4)], 1, 0).wait()
        else:
            with pytest.raises(MismatchError, match="size differs"):
                group.recv([torch.ones(2)], 0, 0).wait()
        group.barrier().wait()

    in_group(2, body, Config(collective_timeout=timedelta(seconds=5)))


def test_messages_of_a_rank_that_has_left() -> None:
    left = threading.Event()

    def body(group: FarandoleGroup) -> None:
        if group.rank() == 0:
            for count in (3, 0, 5):
                group.send([torch.full((count,), 2.0)], 1, 0).wait()
            group.send([torch.full((4,), 2.0)], 1, 7)
            group.shutdown()
            left.set()
            return
        assert left.wait(SHORT.total_seconds())
        for count, tag in ((3, 0), (4, 7), (0, 0), (5, 0)):
            received = torch.zeros(count)
            group.recv([received], 0, tag).wait()
            assert received.tolist() == [2.0] * count
        with pytest.raises(PeerLost, match="rank 0"):
            group.recv([torch.zeros(1)], 0, 0).wait()

    in_group(2, body)


def test_a_message_has_its_event_in_the_profiler_before_the_wait_returns() -> None:
    """A profiler that stops while another thread adds an event corrupts memory."""

    def body(group: FarandoleGroup) -> None:
        for _ in range(50):
            tensor = torch.ones(1)
            work = group.send([tensor], 1, 0) if group.rank() == 0 else group.recv([tensor], 0, 0)
            recorded = work.recorded
            assert recorded is not None
            work.wait()
            assert recorded.done()

    with torch.autograd.profiler.profile():
        in_group(2, body)


def test_lazily_negated_views() -> None:
    def body(group: FarandoleGroup) -> None:
        values = torch.complex(torch.ones(3), torch.full((3,), group.rank() + 1.0))
        negated = values.conj().imag  # -1 on rank 0, -2 on rank 1
        assert negated.is_neg()
        if group.rank() == 0:
            group.send([negated], 1, 0).wait()
        else:
            group.recv([negated], 0, 0).wait()
            assert values.imag.tolist() == [1.0] * 3
            assert negated.tolist() == [-1.0] * 3
        group.allreduce([negated]).wait()
        assert negated.tolist() == [-2.0] * 3
        assert values.imag.tolist() == [2.0] * 3

    in_group(2, body)


def test_a_message_that_does_not_come() -> None:
    def body(group: FarandoleGroup) -> None:
        if group.rank() == 0:
            with pytest.raises(CollectiveTimeout, match=r"recv with tag 3 of float32\[1\].*waited .* rank 1") as caught:
                group.recv([torch.zeros(1)], 1, 3).wait()
            assert caught.value.missing == (1,)
            group.send([torch.ones(1)], 1, 3).wait()
        else:
            late = torch.zeros(1)
            while not late.any():
                time.sleep(0.05)  # the wait of this rank must not be the longer one
                work = group.recv([late], 0, 3)
                try:
                    work.wait()
                except CollectiveTimeout:
                    continue

    in_group(2, body, Config(collective_timeout=timedelta(seconds=1)))


def test_bits_of_integers() -> None:
    def body(group: FarandoleGroup) -> None:
        rank, size = group.rank(), group.size()
        ranks = [torch.tensor([3 + 5 * each, each]) for each in range(size)]
        folds = {dist.ReduceOp.BAND: torch.bitwise_and, dist.ReduceOp.BOR: torch.bitwise_or}
        for op, fold in {**folds, dist.ReduceOp.BXOR: torch.bitwise_xor}.items():
            whole = reduce(fold, ranks)
            reduced = ranks[rank].clone()
            options = dist.AllreduceOptions()
            options.reduceOp = op
            group.allreduce([reduced], options).wait()
            assert torch.equal(reduced, whole)
            several = dist.AllreduceCoalescedOptions()
            several.reduceOp = op
            pair = [ranks[rank].clone(), ranks[rank].clone().view(2, 1)]
            group.allreduce_coalesced(pair, several).wait()
            assert torch.equal(pair[1].view(-1), whole)
            rooted = dist.ReduceOptions()
            rooted.reduceOp, rooted.rootRank = op, 1
            mine = ranks[rank].clone()
            group.reduce([mine], rooted).wait()
            assert torch.equal(mine, whole if rank == 1 else ranks[rank])
            part, scattered = torch.zeros(1, dtype=torch.int64), dist.ReduceScatterOptions()
            scattered.reduceOp = op
            group.reduce_scatter_single(part, ranks[rank], scattered).wait()
            assert part.item() == whole[rank]

    in_group(2, body)


def test_sparse_sums() -> None:
    def body(group: FarandoleGroup) -> None:
        rank, size = group.rank(), group.size()

        def of(each: int) -> torch.Tensor:
            indices = torch.tensor([[*range(each), 0], [0] * (each + 1)])
            values = torch.full((each + 1, 2), 1.0 + each)
            return torch.sparse_coo_tensor(indices, values, (4, 2, 2), check_invariants=True)

        tensor = of(rank)
        group.allreduce([tensor]).wait()
        assert torch.equal(tensor.to_dense(), reduce(torch.add, map(of, range(size))).to_dense())
        maximum = dist.AllreduceOptions()
        maximum.reduceOp = dist.ReduceOp.MAX
        with pytest.raises(InvalidRequest, match="only SUM is supported for sparse"):
            group.allreduce([of(rank)], maximum)

    in_group(3, body)


def test_a_monitored_barrier_names_who_does_not_come() -> None:
    def body(group: FarandoleGroup) -> None:
        group.monitored_barrier(SHORT)
        if group.rank() == 0:
            with pytest.raises(CollectiveTimeout, match="Rank 1 failed to pass monitoredBarrier") as caught:
                group.monitored_barrier(timedelta(seconds=0.5))
            assert caught.value.missing == (1,)
        elif group.rank() == 2:
            with pytest.raises(CollectiveTimeout, match="Rank 2 successfully reached monitoredBarrier, but"):
                group.monitored_barrier(timedelta(seconds=0.5))
        group.barrier().wait()
        if group.rank() == 0:
            with pytest.raises(CollectiveTimeout, match="Ranks 1, 2 failed to pass monitoredBarrier"):
                group.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=True)
        group.barrier().wait()

    in_group(3, body)
