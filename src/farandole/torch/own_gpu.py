"""Default GPU of a rank: the GPU at its local rank, unless the program chooses one."""

import torch

from farandole.core.default import process_local_rank


def prefer_own_gpu() -> None:
    """Make the GPU at the local rank the current one when PyTorch starts CUDA, if `init()` was called before.

    PyTorch runs the choice in the thread of the program's first use of CUDA. If that is `torch.cuda.set_device`, the
    program's choice comes later and counts. This function itself does not start CUDA."""
    if torch.version.cuda is not None and not torch.cuda.is_initialized():
        torch.cuda._lazy_call(_choose)


def _choose() -> None:
    place = process_local_rank()
    # If a rank sees no GPU at its local rank, its launcher has assigned it a GPU, or the host has too few.
    if place is not None and 0 < place < torch.cuda.device_count():
        torch.cuda.set_device(place)
