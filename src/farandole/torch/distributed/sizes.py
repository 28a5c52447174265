"""Sizes of tensors and of their parts on each rank."""

from collections.abc import Sequence

import torch

from farandole.errors import InvalidRequest
from farandole.torch.distributed.names import SinglePart

__all__ = ["require_received", "require_times", "shares_of"]

Tensor = torch.Tensor


def require_times(size: int, whole: Tensor, part: Tensor, what: str) -> None:
    """Raise `InvalidRequest` unless `whole` has room for `part` of each of `size` ranks."""
    if whole.numel() != part.numel() * size:
        raise InvalidRequest(
            what, f"{whole.numel()} elements of all ranks are not {size} times the {part.numel()} of this one"
        )


def require_received(what: str, wanted: Sequence[int], part: SinglePart) -> None:
    """Raise `InvalidRequest` unless as many elements came from each rank as are `wanted`."""
    received = part.received_splits()
    if received != list(wanted):
        raise InvalidRequest(what, f"{received} elements came from the ranks, and the outputs have room for {wanted}")


def shares_of(row: Tensor, tensor: Tensor, splits: Sequence[int], size: int, which: str, what: str) -> list[int]:
    """Return the numbers of elements of `row` for each rank, where `splits` count rows of `tensor`."""
    rows = tensor.shape[0] if tensor.dim() > 0 else 1
    if not splits:
        if rows % size:
            raise InvalidRequest(what, f"the {which} has {rows} rows for {size} ranks; give its split sizes")
        return [row.numel() // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise InvalidRequest(
            what, f"the {which} has {rows} rows for {size} ranks, which split sizes {splits} do not add up to"
        )
    return [split * row.numel() // max(1, rows) for split in splits]
