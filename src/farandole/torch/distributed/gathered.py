"""Reductions that the engine lacks, by way of an allgather: of sparse tensors, and of the bits of integers.

An allgather moves as many times the bytes of a reduction as there are ranks."""

import functools
from collections.abc import Callable, Mapping

import torch
from torch.distributed import ReduceOp

from farandole.core.operations import kinds
from farandole.core.operations.request import Request
from farandole.errors import InvalidRequest
from farandole.torch.distributed.names import SinglePart
from farandole.torch.distributed.submitter import Submitter
from farandole.torch.distributed.tensors import ADAPTER
from farandole.torch.distributed.work import Results, Work

__all__ = ["Fold", "fold_bits", "fold_of", "sum_sparse"]

Tensor = torch.Tensor
Fold = Callable[[Tensor, Tensor], Tensor]

_FOLDS: Mapping[ReduceOp.RedOpType, Fold] = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def fold_of(asked: ReduceOp, dtype: torch.dtype) -> Fold | None:
    """Return the function for torch's `ReduceOp` of bits; None for another one, or if `dtype` has no bits."""
    op: ReduceOp.RedOpType = asked.op  # type: ignore[attr-defined]  # torch's stub lacks it
    return None if dtype.is_floating_point or dtype.is_complex else _FOLDS.get(op)


def fold_bits(
    submitter: Submitter,
    what: str,
    fold: Fold,
    source: Tensor,
    keep: Callable[[Tensor], Tensor],
    results: Results,
    now: bool,
) -> Work:
    """Reduce a dense tensor; `keep` gets the result."""

    def finish(like: Tensor, part: SinglePart) -> None:
        keep(functools.reduce(fold, ADAPTER.adopt(part.result(), like)))

    return _gather(submitter, what, source.unsqueeze(0), finish, results, now)


def sum_sparse(submitter: Submitter, what: str, asked: ReduceOp, tensor: Tensor, now: bool) -> Work:
    """Sum sparse tensors (COO) in place; ranks may differ in the indices that have values."""
    if asked.op != ReduceOp.SUM:  # type: ignore[attr-defined]  # as above
        raise InvalidRequest(what, "only SUM is supported for sparse tensors")
    part = tensor.detach().coalesce()
    gathered: list[Tensor] = []

    def finish(like: Tensor, part: SinglePart) -> None:
        gathered.append(ADAPTER.adopt(part.result(), like))

    def keep() -> None:
        indices, values = gathered
        with torch.no_grad():
            whole = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)
            tensor.copy_(whole.coalesce())

    rows = (part.indices().t().contiguous(), part.values().contiguous())
    return submitter.together([_gather(submitter, what, row, finish, [row], now) for row in rows]).finished_by(
        keep, [tensor]
    )


def _gather(
    submitter: Submitter,
    what: str,
    rows: Tensor,
    finish: Callable[[Tensor, SinglePart], None],
    results: Results,
    now: bool,
) -> Work:
    """Gather rows of all ranks; `finish` gets this rank's, and the operation with all of them as its result."""
    request, signature = Request(kinds.ALLGATHER, what), (rows.dtype, rows.shape[1:])
    return submitter.submit(request, signature, (rows, None), results, now, functools.partial(finish, rows))
