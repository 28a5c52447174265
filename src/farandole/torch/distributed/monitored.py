"""A barrier that names the ranks that do not come."""

import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch

from farandole.errors import CollectiveTimeout
from farandole.torch.distributed.work import Work

__all__ = ["monitored_barrier"]

# torch's programs read these sentences.
MISSING = "failed to pass monitoredBarrier"
ARRIVED = "successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"


def monitored_barrier(
    start: Callable[[str, torch.Tensor, int], Work], rank: int, size: int, timeout: timedelta, wait_all_ranks: bool
) -> None:
    """Wait until all ranks have called it, up to `timeout`; `start` sends a tensor to a rank, or receives one.

    Raises `CollectiveTimeout`: on rank 0 with the first missing rank, or with all if it should wait for all ranks; on
    the other ranks if rank 0 has not let them go on."""
    end = time.monotonic() + timeout.total_seconds()
    token = torch.zeros(1, dtype=torch.uint8)

    def awaited(works: Iterable[Work]) -> list[bool]:
        """Return of each work whether it is complete in time."""
        return [_completes(work, end) for work in works]

    def late(ranks: list[int], problem: str) -> CollectiveTimeout:
        return CollectiveTimeout(f"monitored_barrier: {problem}", ranks, timeout.total_seconds())

    if rank != 0:
        if not all(awaited([start("send", token, 0), start("recv", token, 0)])):
            raise late([0], f"Rank {rank} {ARRIVED}")
        return
    if size > 1 and timeout <= timedelta(0):
        raise late([], "Rank 0 timed out in monitoredBarrier")
    missing = []
    for peer in range(1, size):
        if not all(awaited([start("recv", token, peer)])):
            missing.append(peer)
            if not wait_all_ranks:
                break
    if missing:
        who = f"Rank {missing[0]}" if not wait_all_ranks else f"Ranks {', '.join(map(str, missing))}"
        raise late(missing, f"{who} {MISSING}")
    awaited([start("send", token, peer) for peer in range(1, size)])


def _completes(work: Work, end: float) -> bool:
    if work.is_completed():
        return work.wait()
    try:
        # At least a moment: a message that is here already counts.
        return work.wait(timedelta(seconds=max(0.01, end - time.monotonic())))
    except TimeoutError:
        return False
