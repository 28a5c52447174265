"""Collectives between hosts, simulated in one process: rank r is on host r % hosts."""

import pytest

from helpers.collectives import check_collectives
from helpers.ranks import run_ranks


@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (4, 2), (6, 3), (6, 2), (3, 2), (4, 3)])
def test_every_collective(size: int, hosts: int) -> None:
    run_ranks(size, check_collectives, hosts=hosts)
