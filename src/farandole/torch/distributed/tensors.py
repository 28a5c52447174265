"""Tensors in the engine's form, and lists of them as one."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.autograd.graph import increment_version

from farandole.errors import InvalidRequest
from farandole.torch.adapter import DTYPES, TorchAdapter

__all__ = [
    "StridedOutput",
    "flat",
    "is_dense",
    "joined",
    "one",
    "packed",
    "readable",
    "require_apart",
    "resolved",
    "unpack",
    "writable",
]

Tensor = torch.Tensor

ADAPTER = TorchAdapter()


def one(tensors: Sequence[Tensor], what: str) -> Tensor:
    """Return the only tensor of a list: torch passes lists, from the days of several devices per process."""
    if len(tensors) != 1:
        raise InvalidRequest(what, f"takes one tensor of each rank, got {len(tensors)}")
    return tensors[0]


class StridedOutput(Exception):
    """An output is not dense; a dense copy can take its place."""


def readable(tensor: Tensor, what: str, write: bool = False) -> Tensor:
    """Return the tensor, or a dense copy, for the engine to read; complex numbers as pairs of real ones.

    Raises `InvalidRequest` with the reason if it cannot, and `StridedOutput` if a copy would be written to."""
    if tensor.is_complex() and tensor.layout is torch.strided:
        tensor = torch.view_as_real(_dense(tensor.detach(), what, write))
    refusal = ADAPTER.refusal(tensor)
    if refusal is not None:
        raise InvalidRequest(what, refusal)
    return _dense(tensor.detach() if tensor.requires_grad else tensor, what, write)


def writable(tensor: Tensor, what: str) -> Tensor:
    """Return the tensor for the engine to read and write; raises as `readable` does. Autograd notes the change."""
    increment_version(tensor)
    return readable(tensor, what, write=True)


def flat(tensor: Tensor, what: str, write: bool = False) -> Tensor:
    """Return the tensor as one row. A dtype that the engine cannot reduce becomes bytes, which it can move."""
    if tensor.dtype not in DTYPES and tensor.layout is torch.strided:
        # As a row first: only then has a single element the stride 1, without which it cannot become bytes.
        tensor = _row(_dense(tensor.detach(), what, write)).view(torch.uint8)
    return (writable if write else readable)(tensor, what).view(-1)


def _row(tensor: Tensor) -> Tensor:
    """Return a dense tensor as one row of stride 1; dimensions of one element may have any stride."""
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor's memory holds its values in order: contiguous, and no lazily negated or conjugated
    view."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def resolved(tensor: Tensor) -> Tensor:
    """Return a dense tensor of the same values, without a gradient."""
    return tensor.detach().resolve_neg().resolve_conj().contiguous()


def _dense(tensor: Tensor, what: str, write: bool) -> Tensor:
    if is_dense(tensor):
        return tensor
    dense = resolved(ADAPTER.dense(tensor, what, write))
    if write:
        raise StridedOutput
    return dense


def joined(rows: Sequence[Tensor]) -> Tensor | None:
    """Return flat tensors as one if they are adjacent in memory, like the pieces of one tensor."""
    first = rows[0]
    for here, there in pairwise(rows):
        if here.data_ptr() + here.nbytes != there.data_ptr():
            return None
        if here.untyped_storage().data_ptr() != there.untyped_storage().data_ptr():
            return None
    return first.as_strided((sum(row.numel() for row in rows),), (1,))


def packed(rows: Sequence[Tensor]) -> Tensor:
    """Return flat tensors as one, copied only if they are not adjacent."""
    whole = joined(rows)
    return torch.cat(list(rows)) if whole is None else whole


def require_apart(source: Tensor, target: Tensor, place: int | None, what: str) -> None:
    """Refuse an output that overlaps its input, unless it begins `place` bytes after the input's begin.

    Other ranks may still read the input while the output is written. Both are flat."""
    distance = target.data_ptr() - source.data_ptr()
    if distance != place and -target.nbytes < distance < source.nbytes and source.nbytes and target.nbytes:
        raise InvalidRequest(what, "the output overlaps the input; give tensors of their own")


def unpack(rows: Sequence[Tensor], result: object) -> None:
    """Copy the engine's flat result into `rows` one after the other."""
    whole = ADAPTER.adopt(result, rows[0])
    for row, values in zip(rows, whole.split([row.numel() for row in rows]), strict=True):
        row.copy_(values)
