"""The GPU that a program's ranks use where the program chooses none: the one at the local rank."""

import torch

from farandole.core.default import process_local_rank

__all__ = ["prefer_own_gpu"]


def prefer_own_gpu() -> None:
    """Make the GPU at the local rank the current one when PyTorch starts CUDA, if `init()` was called before.

    PyTorch calls this in the thread of its first use of CUDA, which may be the program's own `torch.cuda.set_device`:
    that comes after, and counts. So nothing starts CUDA here, and a program that uses no GPU sees none."""
    if torch.version.cuda is not None and not torch.cuda.is_initialized():
        torch.cuda._lazy_call(_choose)


def _choose() -> None:
    place = process_local_rank()
    # Ranks that see as many GPUs as their place or fewer have been given their own, or there are not enough.
    if place is not None and 0 < place < torch.cuda.device_count():
        torch.cuda.set_device(place)
