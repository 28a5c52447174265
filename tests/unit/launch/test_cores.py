"""Cores and threads per rank."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.launch.cores import available_cores, share_of, threads_per_rank


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (1, 1, 1)])
def test_threads(cores: int, ranks: int, threads: int) -> None:
    assert threads_per_rank(cores, ranks) == threads


@given(st.integers(1, 40), st.integers(1, 40))
def test_shares(cores: int, ranks: int) -> None:
    shares = [share_of(rank, ranks, list(range(cores))) for rank in range(ranks)]
    assert all(shares)
    if ranks <= cores:
        assert [core for share in shares for core in share] == list(range(cores))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("150000 100000", 2), ("1000 100000", 1)])
def test_quota_of_a_container(tmp_path: Path, text: str, cores: int | None) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    mine = len(os.sched_getaffinity(0))
    assert available_cores(quota) == (mine if cores is None else min(mine, cores))
    assert available_cores(tmp_path / "none") == mine
