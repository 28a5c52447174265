"""Warning about a rank that trains with farandole and is in a process group of torch.distributed, too."""

import functools
import logging

import torch.distributed as dist

from farandole.topology import JobEnvironment

log = logging.getLogger(__name__)


def warn_of_second_group() -> None:
    """Log a warning, once, if torchrun's variables have made this rank a member of another backend's process group."""
    # A group of ours may have gloo's name.
    if dist.is_available() and dist.is_initialized() and not type(dist.group.WORLD).__module__.startswith("farandole."):
        _warn(dist.get_backend())


@functools.cache
def _warn(backend: str) -> None:
    job = JobEnvironment.read()
    if "farandole" in backend or job is None or job.size == 1 or JobEnvironment.without_torch() is not None:
        return
    log.warning(
        "rank %d trains with farandole, and has joined a process group of %s by the variables of torchrun (RANK, "
        "WORLD_SIZE, ...), as accelerate does: a library may divide this rank's rows once more among all ranks. Leave "
        "these variables out: use farandole run --no-torch-env, horovodrun, or FARANDOLE_TORCH_ENV=no",
        job.rank,
        backend,
    )
