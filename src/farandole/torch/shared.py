"""Tensors in memory that the ranks of a host share."""

from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack

from farandole.core import default


def empty_shared(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialized tensor, as `torch.empty` does, that the other ranks of this host can read.

    An allreduce in place of such tensors on every rank copies nothing. The memory is freed with its last view, also
    after `shutdown`. Across several hosts it is ordinary memory. Raises `InvalidRequest` when this rank's space for
    such memory is exhausted."""
    # With torch's own error for an invalid size; its stub does not know a single sequence.
    shape: torch.Size = torch.empty(*size, device="meta").shape  # type: ignore[arg-type]
    kind = torch.get_default_dtype() if dtype is None else dtype
    memory = default.context().empty_shared(shape.numel() * kind.itemsize)
    return from_dlpack(memory).view(kind).view(shape)
