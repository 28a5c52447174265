"""Processor cores of this machine, and the share of a rank."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores(quota: Path = CGROUP_QUOTA) -> int:
    """Return the number of cores that this process may keep busy: its affinity, limited by a container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        limit, period = quota.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores  # no cgroup v2 here
    if limit == "max":
        return cores
    return max(1, min(cores, math.ceil(int(limit) / int(period))))


def threads_per_rank(cores: int, ranks: int) -> int:
    """Return the number of threads with which `ranks` processes together fill `cores`, at least 1."""
    return max(1, cores // ranks)


def share_of(local_rank: int, ranks: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Return the cores of one rank, which are neighbors. Ranks share a core only if there are more ranks than cores."""
    if ranks >= len(cores):
        return (cores[local_rank % len(cores)],)
    start, end = local_rank * len(cores) // ranks, (local_rank + 1) * len(cores) // ranks
    return tuple(cores[start:end])
