"""A rank lost among two hosts while an operation of NCCL runs: the others hear of it, and do not hang.

The hosts are network namespaces, and NCCL and CUDA stand-ins. No data goes between the processes by these, so an
operation never ends by itself, as NCCL's do not when a rank is lost."""

import ctypes
import os
import signal
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
from namespaces import DEVICE, ip, problem

from farandole.config import Config
from farandole.core.context import Context
from farandole.core.default import use
from farandole.core.wiring import start
from farandole.errors import PeerLost
from farandole.meeting.rendezvous import from_environment
from helpers.hosts import run_on_hosts
from helpers.stand_in_cuda import built, load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(problem()), reason=problem() or "namespaces"),
]

HEARTBEAT = timedelta(seconds=3)
SOON = 1.0  # seconds
GENEROUS = 15.0  # seconds; this machine may be busy
VICTIM = 1


def lose(how: str) -> None:
    """End this rank, or cut its host off, once the operation is under way."""
    time.sleep(SOON)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    ip("link", "set", DEVICE, "down")


def sums_until_a_loss(outer: Context, how: str, file: str) -> tuple[int, float, int]:
    """Return who was lost, the seconds until that was heard, and how many communicators were aborted."""
    from helpers.device_arrays import ProtocolArray, binding_of

    outer.shutdown()
    load()
    nccl = ctypes.CDLL(file)
    nccl.stand_in_nccl_far(1)
    start.find_nccl = lambda: [file]
    hvd = binding_of(ProtocolArray)
    with Context(from_environment(), outer.config) as context, use(context):
        mine = ProtocolArray.of(np.ones(9, np.float32), context.rank)  # each rank has a GPU of its own
        if context.rank == VICTIM:
            threading.Thread(target=lose, args=(how,), daemon=True).start()
        began = time.monotonic()
        try:
            hvd.allreduce_(mine, op=hvd.Sum, name="x")
        except PeerLost as lost:
            return lost.rank, time.monotonic() - began, nccl.stand_in_nccl_aborted()
    raise AssertionError("an operation of one rank alone has ended")


@pytest.mark.parametrize("how", ["kill", "cable"])
def test_a_lost_rank_ends_operations_among_gpus_of_two_hosts(how: str) -> None:
    load()  # builds what the ranks load
    file = str(built("stand_in_nccl", "libstand_in_nccl.so.2"))
    dies = [VICTIM] if how == "kill" else []
    results = run_on_hosts("AB", sums_until_a_loss, how, file, config=Config(heartbeat=HEARTBEAT), dies=dies)
    for rank, result in enumerate(results):
        if rank not in dies:
            lost, seconds, aborted = result
            assert (lost, aborted) == (1 - rank, 1)
            assert seconds < SOON + HEARTBEAT.total_seconds() + GENEROUS
