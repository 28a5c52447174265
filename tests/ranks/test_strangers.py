"""Crowds of strangers at the ranks' sockets while they connect: nobody waits for them, and nobody fails."""

import time
from contextlib import ExitStack

import numpy as np
import pytest

from farandole.config import Config
from farandole.core import connect as connecting
from farandole.core.context import Context
from farandole.core.kinds import ALLREDUCE
from farandole.core.peers import Arrivals
from farandole.handshake import join_address
from farandole.rendezvous import from_environment
from helpers.ranks import run_ranks
from helpers.strangers import crowd

STRANGERS = 500
# Seconds that a crowd may add. Three tries, because the crowd and other tests need the machine's cores as well;
# `tools/attack.py` measures it.
SLACK, TRIES = 1.0, 3


def starts_among_strangers(outer: Context, strangers: int, hosts: int) -> tuple[float, float, float]:
    """Return when all strangers had come to this rank, when it had started, and a sum over all ranks."""
    outer.shutdown()
    began = 0.0
    with ExitStack() as stack:

        class Besieged(Arrivals):
            def __init__(self, listeners, rendezvous):  # type: ignore[no-untyped-def]
                nonlocal began
                super().__init__(listeners, rendezvous)
                tcp, unix = listeners
                if strangers:
                    addresses = [join_address(*tcp.getsockname()[:2]), unix.getsockname().hex()]
                    stack.enter_context(crowd(addresses, strangers))
                began = time.monotonic()

        connecting.Arrivals = Besieged  # type: ignore[misc]
        with Context(from_environment(), Config(), host=f"host {outer.rank * hosts // outer.size}") as context:
            started = time.monotonic()
            values = np.ones(1000, np.float32)
            context.engine.run(ALLREDUCE, "x", values, values, op=1)
            return began, started, float(values.sum())


def seconds_to_start(strangers: int, hosts: int) -> float:
    found = run_ranks(2, starts_among_strangers, strangers, hosts, how="processes")
    assert [total for *_, total in found] == [2000.0] * 2
    return max(started for _, started, _ in found) - max(began for began, *_ in found)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_crowd_at_every_socket_of_every_rank_adds_no_time(hosts: int) -> None:
    alone = seconds_to_start(0, hosts)
    assert any(seconds_to_start(STRANGERS, hosts) < alone + SLACK for _ in range(TRIES))
