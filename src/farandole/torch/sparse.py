"""Sparse tensors: an allreduce made of two allgathers."""

from collections.abc import Callable

import torch

from farandole.core.operations.reduction import Average, Sum
from farandole.core.process_sets.process_set import ProcessSet, global_process_set, membership_of
from farandole.errors import InvalidRequest
from farandole.torch.ops import allgather_async

__all__ = ["sparse_allreduce_async"]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start adding (op=Sum) or averaging (op=Average) sparse tensors over all ranks; ranks may differ in entries.

    Never blocks. Returns a function to call once for the sparse result, which waits until every rank has made the
    request; coalescing the result adds up entries of several ranks at one place."""
    shown = name or "sparse_allreduce"
    if op not in (Average, Sum):
        raise InvalidRequest(shown, "a sparse tensor can be reduced with op=Average or op=Sum only")
    if tensor.layout is not torch.sparse_coo:
        raise InvalidRequest(shown, f"expected a sparse COO tensor, got layout {tensor.layout}")
    size = membership_of(process_set, "allgather", name).size
    # An entry may occur twice, also from one rank: coalescing once here is cheaper than on every rank.
    mine = tensor.detach().coalesce()
    # Indices are gathered by entry, so the entries must be the first dimension.
    indices = allgather_async(mine.indices().t().contiguous(), None if name is None else f"{name}.indices", process_set)
    shares = mine.values()
    if op == Average:
        # Each rank divides its own entries: fewer than all ranks have together.
        shares = shares.div(size, rounding_mode=None if shares.is_floating_point() else "trunc")
    values = allgather_async(shares.contiguous(), None if name is None else f"{name}.values", process_set)

    def result() -> torch.Tensor:
        return torch.sparse_coo_tensor(indices.wait().t(), values.wait(), tensor.size(), check_invariants=True)

    return result
