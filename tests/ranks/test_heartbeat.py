"""A process that stands still is lost for the ranks of other hosts, as is one whose host has vanished."""

import os
import signal
import subprocess
import time
from datetime import timedelta

import numpy as np
import pytest

from farandole.config import Config
from farandole.core.context import Context
from farandole.core.operations.kinds import ALLREDUCE
from farandole.errors import PeerLost
from farandole.meeting.rendezvous import from_environment
from helpers.ranks import run_ranks
from helpers.recurring import recurring

HEARTBEAT = timedelta(seconds=1)
SUM = 1


def stands_still(outer: Context, victim: int, elements: int) -> tuple[int, str]:
    """Reduce until the victim, the only rank of its pretended host, is stopped; return who was lost, and why."""
    outer.shutdown()
    host = "its own" if outer.rank == victim else "of the others"
    with Context(from_environment(), Config(heartbeat=HEARTBEAT), host=host) as context:
        values = np.ones(elements, np.float32)
        end = time.monotonic() + 20
        step = 0
        try:
            while time.monotonic() < end:
                context.engine.run(recurring(ALLREDUCE, op=SUM), f"x{step % 3}", values, values)
                step += 1
                if context.rank == victim and step == 50:
                    subprocess.Popen(["sh", "-c", f"sleep 8; kill -KILL {os.getpid()}"])
                    os.kill(os.getpid(), signal.SIGSTOP)
        except PeerLost as error:
            return error.rank, error.reason
    raise AssertionError("nobody was lost")


@pytest.mark.parametrize("elements", [10, 1 << 18], ids=["small", "large"])
@pytest.mark.parametrize("victim", [0, 2], ids=["coordinator", "other"])
def test_a_stopped_process_on_another_host_is_lost(victim: int, elements: int) -> None:
    results = run_ranks(3, stands_still, victim, elements, how="processes", dies=[victim], timeout=40)
    for rank, result in enumerate(results):
        if rank != victim:
            who, why = result
            assert who == victim
            assert why.startswith("no sign of life for 1 s")
