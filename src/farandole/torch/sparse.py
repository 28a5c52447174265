"""Sparse tensors: an allreduce made of a grouped allgather."""

from collections.abc import Callable

import torch

from farandole.core.operations import kinds
from farandole.core.operations.reduction import Average, Sum
from farandole.core.operations.requests import request_of
from farandole.core.process_sets.process_set import ProcessSet, global_process_set, membership_of
from farandole.errors import InvalidRequest
from farandole.torch.ops import requests

# Entries at one place are looked for in a table of at least so many bytes per entry, a power of two. Of entries at
# different places, fewer than 1 in 8 then share a byte with another one.
_BYTES_PER_ENTRY = 4


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start adding (op=Sum) or averaging (op=Average) sparse tensors over all ranks; ranks may differ in entries.

    An average of integers is exact, and truncated toward zero, as `allreduce`'s; bool tensors cannot be averaged. Never
    blocks. Returns a function to call once for the sparse result, which waits until every rank has made the request;
    coalescing the result adds up entries at one place."""
    return start_sparse(tensor, name, op, process_set, wake=True)


def start_sparse(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet, wake: bool
) -> Callable[[], torch.Tensor]:
    """Do as `sparse_allreduce_async`; without `wake` the operation starts when this rank waits for one."""
    shown = name or "sparse_allreduce"
    if op not in (Average, Sum):
        raise InvalidRequest(shown, "a sparse tensor can be reduced with op=Average or op=Sum only")
    if tensor.layout is not torch.sparse_coo:
        raise InvalidRequest(shown, f"expected a sparse COO tensor, got layout {tensor.layout}")
    if op == Average and tensor.dtype == torch.bool:
        raise InvalidRequest(shown, "bool tensors cannot be averaged; use op=Sum (or)")
    size, shape = membership_of(process_set, "grouped_allgather", name).size, tensor.size()
    mine = tensor.detach()
    if _repeats_itself(mine, size):
        mine = mine.coalesce()
    shares = mine._values()
    whole = op == Average and not shares.is_floating_point()
    if op == Average and not whole:
        shares = shares / size  # each rank divides its own entries: fewer than all ranks have together
    # Indices are gathered by entry, so the entries must be the first dimension.
    parts = [mine._indices().t().contiguous(), shares.contiguous()]
    handle = requests.start(request_of(kinds.ALLGATHER, name, process_set, grouped=True), parts, wake=wake)

    def result() -> torch.Tensor:
        indices, values = handle.wait()
        if not whole:
            return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=True)
        total = torch.sparse_coo_tensor(indices.t(), values.long(), shape, check_invariants=True).coalesce()
        # A sum of all ranks may not fit the dtype, the average does.
        means = total.values().div(size, rounding_mode="trunc").to(values.dtype)
        return torch.sparse_coo_tensor(total.indices(), means, shape, is_coalesced=True, check_invariants=True)

    return result


def _repeats_itself(tensor: torch.Tensor, size: int) -> bool:
    """Return whether to add up entries at one place before they are sent to `size` ranks.

    That takes as long as adding all entries to a parameter. It saves each rank the sending and adding of those
    entries that are not the only ones at their place. Their number is estimated, and never too small."""
    if tensor.is_coalesced():
        return False
    indices, entries = tensor._indices(), tensor._nnz()
    if tensor.sparse_dim() != 1 or not indices.is_cpu or not entries:
        return True
    marks = torch.zeros(_BYTES_PER_ENTRY << entries.bit_length(), dtype=torch.bool)
    marks.index_fill_(0, indices[0] & (len(marks) - 1), True)
    return (entries - int(marks.count_nonzero())) * size >= entries
