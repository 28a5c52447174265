"""Tensors in memory that the ranks of a host share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from farandole.core import default

__all__ = ["empty_shared"]


def empty_shared(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialized tensor, as `torch.empty` does, that the other ranks of this host can read.

    An allreduce in place of such tensors on every rank copies nothing. The memory is freed with its last view, also
    after `shutdown`. Across several hosts it is ordinary memory. Raises `InvalidRequest` when this rank's space for
    such memory is exhausted."""
    given: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    shape = torch.empty(given, device="meta").shape  # torch's own error for an invalid size
    kind = torch.get_default_dtype() if dtype is None else dtype
    memory = default.context().empty_shared(shape.numel() * kind.itemsize)
    return from_dlpack(memory).view(kind).view(shape)
