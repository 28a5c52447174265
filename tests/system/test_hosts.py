"""Several hosts, as network namespaces: right results, no connection too many, and losses that all hear of."""

import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from farandole.core.context import Context
from farandole.core.kinds import ALLREDUCE, BARRIER
from farandole.errors import PeerLost
from helpers.collectives import check_collectives
from helpers.namespaces import DEVICE, problem, run_on_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(problem()), reason=problem() or "namespaces"),
]

HEARTBEAT = timedelta(seconds=3)  # less would take a busy machine for a cable that is pulled
GENEROUS = 15.0  # seconds; this machine may be busy
ESTABLISHED = "01"
SUM = 1


def connections() -> int:
    """Count this namespace's open connections but those to the rendezvous, whose address ends with 254."""
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    # Addresses are written as hexadecimal numbers in the byte order of this machine.
    return sum(state == ESTABLISHED and int(remote[:2], 16) != 254 for _, _, remote, state, *_ in lines)


def checks_and_counts(context: Context) -> tuple[int, list[int], list[int]]:
    check_collectives(context)
    count = connections()
    context.engine.run(BARRIER, "all have counted", None, None)
    return count, context.topology.host_numbers, context.topology.control_parents


@pytest.mark.parametrize("ranks_each", [1, 2])
@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_collectives_over_no_more_connections_than_needed(hosts: int, ranks_each: int) -> None:
    results = run_on_hosts(hosts, ranks_each, checks_and_counts)
    for rank, (count, host_of, parents) in enumerate(results):
        assert host_of == [each // ranks_each for each in range(hosts * ranks_each)]
        here = host_of[rank]
        edges = [(child, parent) for child, parent in enumerate(parents) if parent >= 0]
        control = sum((host_of[child] == here) != (host_of[parent] == here) for child, parent in edges)
        assert count == ranks_each * (hosts - 1) + control


def works_until_a_loss(context: Context, victim: int, how: str) -> tuple[int, float]:
    """Return who was lost and when; the victim loses its cable, or its life, in the middle."""
    values = np.ones(100_000, np.float32)
    for step in range(10**9):
        if context.rank == victim and step == 50:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            subprocess.run(["ip", "link", "set", DEVICE, "down"], check=True)
        try:
            context.engine.run(ALLREDUCE, f"x{step % 3}", values, values, op=SUM)
        except PeerLost as lost:
            return lost.rank, time.monotonic()
    raise AssertionError("nobody was lost")


@pytest.mark.parametrize(("hosts", "ranks_each"), [(2, 1), (3, 2)])
def test_a_cable_that_is_pulled_is_noticed_on_both_sides(hosts: int, ranks_each: int) -> None:
    began = time.monotonic()
    victim = hosts * ranks_each - 1
    cut_off = range(victim - ranks_each + 1, victim + 1)
    results = run_on_hosts(hosts, ranks_each, works_until_a_loss, victim, "cable", heartbeat=HEARTBEAT)
    for rank, (lost, noticed) in enumerate(results):
        assert (lost in cut_off) != (rank in cut_off), f"rank {rank} blames rank {lost}"
        assert noticed - began < HEARTBEAT.total_seconds() + GENEROUS


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_is_killed_is_named_on_all_hosts(victim: int) -> None:
    results = run_on_hosts(3, 2, works_until_a_loss, victim, "kill", dies=[victim])
    for rank, result in enumerate(results):
        if rank != victim:
            assert result[0] == victim
