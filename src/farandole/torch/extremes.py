"""Derivatives of the reductions Min, Max and Product."""

from collections.abc import Callable
from typing import TypeAlias

import torch

from farandole.core.operations.reduction import Max, Min, Product, Sum

Tensor = torch.Tensor

# Reduces a tensor over all ranks with an op; the text distinguishes the requests of one backward pass.
Reduce: TypeAlias = Callable[[Tensor, int, str], Tensor]


def extreme_share(tensor: Tensor, op: int, prescale: float, reduce: Reduce) -> Tensor:
    """Return the part of the gradient of Min or Max that belongs to this rank's `tensor`.

    It is 1 where this rank alone holds the extreme, 0 where another does; ranks that hold it together share it.
    """
    # With a negative factor before it, the largest scaled value is the smallest one, and the reverse.
    chosen = op if prescale >= 0 else {Min: Max, Max: Min}[op]
    extreme = reduce(tensor, chosen, ".extreme")
    held = ((tensor == extreme) | (tensor.isnan() & extreme.isnan())).to(tensor.dtype)
    return held / reduce(held, Sum, ".held")


def others_product(tensor: Tensor, reduce: Reduce) -> Tensor:
    """Return the product of the other ranks' tensors, also where there are zeros."""
    zero = tensor == 0
    filled = torch.where(zero, torch.ones_like(tensor), tensor)
    product = reduce(filled, Product, ".product")
    zeros = reduce(zero.to(tensor.dtype), Sum, ".zeros")
    # Without a zero: divide by our factor. With one: it is ours, or a factor of the others' product.
    alone = torch.where(zero & (zeros == 1), product, torch.zeros_like(product))
    return torch.where(zeros == 0, product / filled, alone)
