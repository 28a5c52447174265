"""Processor cores that processes of this machine may use, and the share of a rank."""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class UsableCores:
    """The cores that a thread may run on, and how many of them its control groups let it keep busy."""

    affinity: str  # bit c stands for core c, hexadecimal
    quota: int  # rounded up; 0 without a quota

    @classmethod
    def of_this_thread(cls) -> Self:
        """Return those of the calling thread."""
        return cls(f"{sum(1 << core for core in os.sched_getaffinity(0)):x}", quota_of_groups() or 0)


def cores_of_all(each: Iterable[UsableCores]) -> int:
    """Return how many cores some threads of one host may keep busy together, as if they shared a quota."""
    mask, quota = 0, 0.0
    for cores in each:
        mask |= int(cores.affinity, 16)
        quota = max(quota, cores.quota or math.inf)
    return int(min(mask.bit_count(), quota))


def available_cores() -> int:
    """Return the number of cores that this thread may keep busy: its affinity, limited by a container's quota."""
    return cores_of_all([UsableCores.of_this_thread()])


def quota_of_groups(groups: Path = CGROUPS, own: Path = OWN_GROUPS) -> int | None:
    """Return how many cores the control groups of this process let it keep busy, rounded up; None without a limit.

    A quota of a group above limits it, too. In a container the top is the container's own group."""
    limits = [limit for folder in _own_folders(groups, own) if (limit := _limit(folder)) is not None]
    return max(1, math.ceil(min(limits))) if limits else None


def _own_folders(groups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of the groups of this process that may limit its processor time, from the lowest to the top."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            # The first version of cgroups has a hierarchy for each controller, the second has one, of number 0.
            tops = [groups, groups / "unified"] if number == "0" else [groups / controllers, groups / "cpu"]
            if number != "0" and "cpu" not in controllers.split(","):
                continue
            names = PurePosixPath(path.lstrip("/"))
            for top in tops:
                yield from (top / each for each in (names, *names.parents))


def _limit(group: Path) -> float | None:
    """Return the cores that one group's quota allows; None without a quota."""
    with suppress(OSError, ValueError):
        limit, period = (group / "cpu.max").read_text().split()
        return int(limit) / int(period)
    with suppress(OSError, ValueError):
        limit = (group / "cpu.cfs_quota_us").read_text()
        return int(limit) / int((group / "cpu.cfs_period_us").read_text()) if int(limit) > 0 else None
    return None


def threads_per_rank(cores: int, ranks: int) -> int:
    """Return the number of threads with which `ranks` processes together fill `cores`, at least 1."""
    return max(1, cores // ranks)


def share_of(local_rank: int, ranks: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Return the cores of one rank, which are neighbors. Ranks share a core only if there are more ranks than cores."""
    if ranks >= len(cores):
        return (cores[local_rank % len(cores)],)
    start, end = local_rank * len(cores) // ranks, (local_rank + 1) * len(cores) // ranks
    return tuple(cores[start:end])
