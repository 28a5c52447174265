"""Crowds of strangers at the ranks' sockets while they connect: nobody waits for them, and nobody fails."""

import pytest

from helpers.attacks import ranks_on_hosts

STRANGERS = 500
# Seconds that a crowd may add. Three tries, because the crowd and other tests need the machine's cores as well;
# `tools/attack.py` measures it.
SLACK, TRIES = 1.0, 3

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("placement", ["AA", "AB"])
def test_a_crowd_at_every_socket_of_every_rank_adds_no_time(placement: str) -> None:
    alone = ranks_on_hosts(placement, 0)
    assert any(ranks_on_hosts(placement, STRANGERS) < alone + SLACK for _ in range(TRIES))
