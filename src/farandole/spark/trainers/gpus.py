"""GPUs of an estimator's ranks: whether all of them compute on one, and which one is whose."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from farandole.core.operations.objects import allgather_object
from farandole.core.public import local_rank, rank
from farandole.errors import ConfigError
from farandole.spark.logs import log_to_driver

__all__ = ["Look", "choose_gpu", "no_gpus"]

# Returns how many GPUs the rank's framework sees, without a start of CUDA, and what it says of them: "PyTorch sees 2".
Look: TypeAlias = Callable[[], tuple[int, str]]

_LISTED = Path("/proc/driver/nvidia/gpus")  # a folder for each, made by NVIDIA's driver


def no_gpus() -> tuple[int, str]:
    """Be the `Look` of a framework whose trainer does not use GPUs."""
    return 0, "this trainer computes on the CPU"


def choose_gpu(wanted: bool | None, look: Look, *, listed: Path = _LISTED) -> int | None:
    """Return the number of this rank's own GPU among those that it sees, its local rank; None to compute on the CPU.

    All ranks compute on GPUs, or none. Without a wish (None) they do where every rank has one, and rank 0 says so if
    GPUs are left unused. Raises `ConfigError` on every rank if GPUs are wanted and a rank has none of its own. A
    collective."""
    if wanted is False:
        return None
    place = local_rank()
    count, seen = look()
    there = len(list(listed.iterdir())) if listed.is_dir() else 0
    lacking = "" if place < count else f"local rank {place} on {socket.gethostname()} has no GPU of its own: {seen}"
    every: list[tuple[str, int]] = allgather_object((lacking, max(count, there)))
    problem = next((f"rank {other}, {lacks}" for other, (lacks, _) in enumerate(every) if lacks), "")
    if not problem:
        return place
    if wanted:
        raise ConfigError(
            "use_gpu",
            f"is True, but {problem}; start fewer ranks on a host, let Spark give a GPU to each, or leave use_gpu out "
            "to train on the CPU where GPUs are missing",
        )
    unused = every[0][1]
    if unused and rank() == 0:
        log_to_driver(
            f"warning: {unused} GPUs are on the host of rank 0, but the ranks compute on the CPU, because {problem}; "
            "use_gpu=False says that this is meant"
        )
    return None
