"""Choice of the devices of an estimator's ranks: one GPU per rank, or the CPU for all ranks."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from farandole.core.operations.objects import allgather_object
from farandole.core.public import local_rank, rank
from farandole.errors import ConfigError
from farandole.spark.driver.messages import log_to_driver

# Returns how many GPUs the rank's framework sees, without starting CUDA, and a text for errors: "PyTorch sees 2 GPUs".
Look: TypeAlias = Callable[[], tuple[int, str]]

_LISTED = Path("/proc/driver/nvidia/gpus")  # NVIDIA's driver has a folder for each GPU there


def no_gpus() -> tuple[int, str]:
    """Return no GPUs: the `Look` of a trainer that computes on the CPU."""
    return 0, "this trainer computes on the CPU"


def gpus_seen(library: str, count: int) -> tuple[int, str]:
    """Return the result of a `Look`: how many GPUs the library sees, and a text about them."""
    return count, f"{library} sees {count} {'GPU' if count == 1 else 'GPUs'}"


def seen_by_torch() -> tuple[int, str]:
    """Return how many GPUs PyTorch sees, and a text about them; a `Look`."""
    import torch  # Keras' other backends do without it

    if torch.version.cuda is None:
        return 0, "PyTorch is built without CUDA"
    return gpus_seen("PyTorch", torch.cuda.device_count())


def choose_gpu(wanted: bool | None, look: Look, *, listed: Path = _LISTED) -> int | None:
    """Return the index of this rank's GPU among those that it sees, which is its local rank; None: use the CPU.

    All ranks compute on GPUs, or none does. If `wanted` is None, they do if every rank has a GPU of its own; otherwise
    rank 0 logs a warning if its host has unused GPUs. Raises `ConfigError` on every rank if GPUs are wanted and a rank
    has none of its own. A collective."""
    if wanted is False:
        return None
    place = local_rank()
    count, seen = look()
    installed = len(list(listed.iterdir())) if listed.is_dir() else 0
    lacking = "" if place < count else f"local rank {place} on {socket.gethostname()} has no GPU of its own: {seen}"
    every: list[tuple[str, int]] = allgather_object((lacking, max(count, installed)))
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
            "set use_gpu=False if this is intended"
        )
    return None
