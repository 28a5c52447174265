"""Process groups of torch in elastic jobs: each belongs to one generation of the job's ranks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from farandole.core import default
from farandole.core.operations.objects import broadcast_object
from farandole.core.wiring.own_address import own_address
from farandole.errors import RendezvousError
from farandole.meeting.frames import Deadline

__all__ = ["blaming_lost_ranks", "find_generation_store"]

HINDSIGHT = 1.0  # seconds until the loss of a rank is known that has broken a meeting


@contextmanager
def blaming_lost_ranks() -> Iterator[None]:
    """Raise `PeerLost` instead of the error of a meeting, if a rank of the job's generation is lost."""
    try:
        yield
    except (RendezvousError, dist.DistNetworkError):
        end = time.monotonic() + HINDSIGHT
        while default.is_elastic() and time.monotonic() < end:
            default.context().engine.require_alive()
            time.sleep(0.01)
        raise


def find_generation_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Return a store for the ranks of this generation, the rank and the size; rank 0 serves it. All ranks must call it.

    Raises `NotInitializedError` before `init`, and `PeerLost` if a rank is lost meanwhile."""
    context = default.context()
    served = None
    if context.rank == 0:
        served = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        mine = own_address(context.rendezvous, context.config, Deadline(timeout)), served.port
    host, port = broadcast_object(mine if served is not None else ("", 0), 0, "elastic.store")
    with blaming_lost_ranks():
        store = served or TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return store, context.rank, context.size
