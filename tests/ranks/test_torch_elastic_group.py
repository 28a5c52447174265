"""The process group of torchft's contract, configured as torchft's manager does it."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from farandole.errors import EngineClosed, InvalidRequest, PeerLost, RendezvousError
from farandole.torch.elastic.process_group import ElasticProcessGroup

Group = ElasticProcessGroup


class Quorum:
    """Groups of three replicas, and the part of torchft's lighthouse and managers that configures them."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.groups = [Group(timedelta(seconds=30)) for _ in range(3)]
        self.number = 0

    def each(self, of: Sequence[int], call: Callable[[int, Group], object]) -> list[object]:
        """Call for each of these replicas at the same time, with its rank and its group."""
        with ThreadPoolExecutor(len(of)) as pool:
            return list(pool.map(call, range(len(of)), [self.groups[number] for number in of]))

    def configure(self, of: Sequence[int]) -> None:
        self.number += 1
        address = f"127.0.0.1:{self.store.port}/torchft/{self.number}"
        self.each(of, lambda rank, group: group.configure(address, f"replica {rank}", rank, len(of), self.number))

    def reconfigure(self, of: Sequence[int]) -> None:
        self.number += 1
        handles = [self.groups[number].get_reconfigure_handle() for number in of]
        opts = SimpleNamespace(uuid=self.number, handles=handles, timeout=None, hints={})
        assert self.each(of, lambda rank, group: group.reconfigure(opts).wait()) == [True] * len(of)

    def sums(self, of: Sequence[int]) -> list[object]:
        """Return the result of an allreduce of 1, 2, ... in each of these replicas, or its error."""

        def call(rank: int, group: Group) -> object:
            assert (group.rank(), group.size()) == (rank, len(of))
            tensor = torch.tensor([rank + 1.0])
            try:
                group.allreduce([tensor], dist.AllreduceOptions()).get_future().wait()
            except RuntimeError:  # torch's, for any error of a future
                return group.errored()
            return tensor.item()

        return self.each(of, call)


@pytest.fixture
def quorum() -> Iterator[Quorum]:
    quorum = Quorum()
    yield quorum
    for group in quorum.groups:
        group.shutdown()
    del quorum.groups, quorum.store, group  # pytest keeps the fixture, and the connections would stay with these


@pytest.mark.parametrize("way", [Quorum.configure, Quorum.reconfigure])
def test_replicas_come_and_go(quorum: Quorum, way: Callable[[Quorum, Sequence[int]], None]) -> None:
    way(quorum, [0, 1])
    assert quorum.sums([0, 1]) == [3.0, 3.0]
    way(quorum, [1, 2, 0])
    assert quorum.sums([1, 2, 0]) == [6.0, 6.0, 6.0]
    way(quorum, [2])
    assert quorum.sums([2]) == [1.0]


def test_an_abort_fails_the_others_until_they_are_configured_again(quorum: Quorum) -> None:
    quorum.configure([0, 1, 2])
    assert [group.errored() for group in quorum.groups] == [None] * 3
    quorum.groups[1].abort()
    assert isinstance(quorum.groups[1].errored(), EngineClosed)

    def fail(rank: int, group: Group) -> object:
        with pytest.raises(PeerLost, match="rank 1 is lost"):
            group.allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()
        return group.rank()

    assert quorum.each([0, 2], fail) == [0, 2]
    quorum.configure([0, 2])
    assert [quorum.groups[number].errored() for number in (0, 2)] == [None, None]
    assert quorum.sums([0, 2]) == [3.0, 3.0]


def test_a_replica_that_does_not_come_is_named(quorum: Quorum) -> None:
    group = quorum.groups[0]
    group.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RendezvousError, match=r"ranks did not come.*1"):
        group.configure(f"127.0.0.1:{quorum.store.port}/late", "replica 0", 0, 2)
    group.set_timeout(timedelta(seconds=30))
    quorum.configure([0, 1])
    assert quorum.sums([0, 1]) == [3.0, 3.0]


def test_operations_of_torchft(quorum: Quorum) -> None:
    quorum.configure([0, 1])

    def call(rank: int, group: Group) -> object:
        most, root = torch.tensor([rank]), torch.tensor([rank])
        group.allreduce([most], dist.ReduceOp.MAX).wait()
        group.broadcast_one(root, 1).wait()
        gathered = torch.empty(2, dtype=torch.int64)
        group.allgather_into_tensor_coalesced([gathered], [torch.tensor([rank])]).wait()
        return most.item(), root.item(), gathered.tolist(), group.getBackendName()

    assert quorum.each([0, 1], call) == [(1, 1, [0, 1], "farandole")] * 2


def test_a_group_without_ranks_says_so() -> None:
    group = Group()
    assert group.errored() is None
    with pytest.raises(InvalidRequest, match="has no ranks yet; call configure"):
        group.allreduce([torch.ones(1)], dist.AllreduceOptions())
