"""Calls of a process group without options: one tensor in place of a list, a root and an operation as arguments."""

from collections.abc import Callable
from datetime import timedelta

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from farandole.config import Config
from farandole.core.context import Context
from farandole.torch.distributed.group import FarandoleGroup
from farandole.torch.distributed.store import StoreRendezvous
from helpers.ranks import run_ranks

SIZE = 3
SHORT = timedelta(seconds=30)

Call = Callable[[FarandoleGroup, int, torch.Tensor, list[torch.Tensor]], object]

# Each is called with the group, the rank, a tensor of the rank's number, and a list of ten times each rank's number;
# then the tensor and the list are as on the right, on each rank.
TENS = [0, 10, 20]
CALLS: dict[str, tuple[Call, list[int], list[list[int]]]] = {
    "broadcast": (lambda group, _, one, many: group.broadcast(one, 1), [1, 1, 1], [TENS] * 3),
    "broadcast by name": (lambda group, _, one, many: group.broadcast(one, root=2), [2, 2, 2], [TENS] * 3),
    "broadcast of rank 0": (lambda group, _, one, many: group.broadcast([one]), [0, 0, 0], [TENS] * 3),
    "in time": (lambda group, _, one, many: group.broadcast(one, 1, SHORT), [1, 1, 1], [TENS] * 3),
    "allreduce": (lambda group, _, one, many: group.allreduce(one), [3, 3, 3], [TENS] * 3),
    "maximum": (lambda group, _, one, many: group.allreduce(one, dist.ReduceOp.MAX), [2, 2, 2], [TENS] * 3),
    "of a list": (lambda group, _, one, many: group.allreduce([one], dist.ReduceOp.MAX), [2, 2, 2], [TENS] * 3),
    "minimum": (lambda group, _, one, many: group.allreduce(one, op=dist.ReduceOp.MIN), [0, 0, 0], [TENS] * 3),
    "reduce": (lambda group, _, one, many: group.reduce(one, 1), [0, 3, 2], [TENS] * 3),
    "reduce to rank 0": (lambda group, _, one, many: group.reduce([one]), [3, 1, 2], [TENS] * 3),
    "greatest": (
        lambda group, _, one, many: group.reduce(one, root=0, op=dist.ReduceOp.MAX),
        [2, 1, 2],
        [TENS] * 3,
    ),
    "allgather": (lambda group, _, one, many: group.allgather(many, one), [0, 1, 2], [[0, 1, 2]] * 3),
    "gather": (
        lambda group, rank, one, many: group.gather(many if rank == 2 else [], one, 2),
        [0, 1, 2],
        [TENS, TENS, [0, 1, 2]],
    ),
    "scatter": (
        lambda group, rank, one, many: group.scatter(one, many if rank == 1 else [], 1),
        TENS,
        [TENS] * 3,
    ),
    "reduce_scatter": (lambda group, _, one, many: group.reduce_scatter(one, many), [0, 30, 60], [TENS] * 3),
    "lowest": (
        lambda group, _, one, many: group.reduce_scatter(one, many, dist.ReduceOp.MIN, SHORT),
        TENS,
        [TENS] * 3,
    ),
    "barrier": (lambda group, _, one, many: group.barrier(), [0, 1, 2], [TENS] * 3),
    "barrier in time": (lambda group, _, one, many: group.barrier(SHORT), [0, 1, 2], [TENS] * 3),
    "barrier by name": (lambda group, _, one, many: group.barrier(timeout=SHORT), [0, 1, 2], [TENS] * 3),
    "options by name": (
        lambda group, _, one, many: group.allreduce([one], opts=c10d.AllreduceOptions()),
        [3, 3, 3],
        [TENS] * 3,
    ),
}


def test_calls_without_options() -> None:
    store = dist.HashStore()

    def rank(context: Context) -> None:
        met = StoreRendezvous(store, context.rank, context.size, secret=None, timeout=SHORT)
        group = FarandoleGroup(met, Config())
        try:
            for name, (call, one, many) in CALLS.items():
                mine, ours = torch.tensor([float(context.rank)]), [torch.tensor([float(each)]) for each in TENS]
                call(group, context.rank, mine, ours).wait()  # type: ignore[attr-defined]
                assert (mine.item(), [each.item() for each in ours]) == (one[context.rank], many[context.rank]), name
            with pytest.raises(TypeError, match="roots"):
                group.broadcast(torch.ones(1), roots=1)
            group.barrier().wait()
        finally:
            group.shutdown()

    run_ranks(SIZE, rank)
