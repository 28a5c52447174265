"""GPUs of a rank's host, found without a framework."""

from pathlib import Path

from farandole.core.builds import cuda_built

__all__ = ["unused_gpus"]

_LISTED = Path("/proc/driver/nvidia/gpus")  # a folder for each, made by NVIDIA's driver


def unused_gpus(listed: Path = _LISTED) -> int:
    """Return how many GPUs this host has that ranks do not compute on, as tensors on GPUs are not reduced."""
    if cuda_built() or not listed.is_dir():
        return 0
    return len(list(listed.iterdir()))
