"""The processor cores of this machine and which of them a rank gets."""

import math
import os
from pathlib import Path

__all__ = ["available_cores", "share_of", "threads_per_rank"]

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores(quota: Path = CGROUP_QUOTA) -> int:
    """How many cores this process may keep busy: its affinity, and the container's quota where there is one."""
    cores = len(os.sched_getaffinity(0))
    try:
        limit, period = quota.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores  # no cgroup v2 here
    if limit == "max":
        return cores
    return max(1, min(cores, math.ceil(int(limit) / int(period))))


def threads_per_rank(cores: int, ranks: int) -> int:
    """How many threads each of `ranks` processes runs so that together they fill `cores`."""
    return max(1, cores // ranks)


def share_of(local_rank: int, ranks: int, cores: list[int]) -> tuple[int, ...]:
    """The cores for one rank: neighbors, no core in two shares unless there are more ranks than cores."""
    if ranks >= len(cores):
        return (cores[local_rank % len(cores)],)
    start, end = local_rank * len(cores) // ranks, (local_rank + 1) * len(cores) // ranks
    return tuple(cores[start:end])
