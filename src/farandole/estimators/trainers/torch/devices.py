"""The device of a rank that trains with PyTorch."""

from collections.abc import Iterable
from typing import Final, TypeVar, cast

import torch
from torch.utils._pytree import tree_map_only

T = TypeVar("T")

CPU: Final = torch.device("cpu")


def device_of(gpu: int | None) -> torch.device:
    """Return the GPU with the index `gpu`, after making it the current device, or the CPU for None."""
    if gpu is None:
        return CPU
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


def to_device(objects: Iterable[object], device: torch.device) -> None:
    """Move the objects that are modules to `device`: the model, and losses and metrics with tensors."""
    for each in objects:
        if isinstance(each, torch.nn.Module):
            each.to(device)


def on_cpu(state: T) -> T:
    """Return a state with all tensors on the CPU; those that are there already are not copied."""
    return cast(T, tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), state))
