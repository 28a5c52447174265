"""Cores and threads per rank."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.cores import (
    UsableCores,
    available_cores,
    cores_of_all,
    quota_of_groups,
    share_of,
    threads_per_rank,
)


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


def write_groups(folder: Path, files: dict[str, str], own: str) -> tuple[Path, Path]:
    """Write files of control groups, and the list of those that a process belongs to; return the paths."""
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own").write_text(own)
    return folder / "cgroup", folder / "own"


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, "0::/\n", None),
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "1000 100000\n"}, "0::/\n", 1),
        ({"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, "0::/a/b\n", 2),
        ({"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "100000 100000\n"}, "0::/a/b\n", 1),
        # A container that does not see its own path below the top.
        ({"cpu.max": "300000 100000\n"}, "0::/docker/9f3a\n", 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n", None),
        (
            {"cpu,cpuacct/p/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/p/cpu.cfs_period_us": "100000\n"},
            "11:cpuset:/p\n4:cpu,cpuacct:/p\n0::/\n",
            3,
        ),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "1:cpu:/docker/9f3a\n", 1),
        ({}, "0::/\n", None),
        ({}, "", None),
    ],
)
def test_quota_of_control_groups(tmp_path: Path, files: dict[str, str], own: str, cores: int | None) -> None:
    assert quota_of_groups(*write_groups(tmp_path, files, own)) == cores


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert quota_of_groups(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("each", "cores"),
    [
        ([("3", 0), ("3", 0)], 2),
        ([("1", 0), ("2", 0)], 2),  # each rank is bound to a core of its own
        ([("1", 0), ("1", 0)], 1),
        ([("ff", 2), ("ff", 2)], 2),
        ([("ff", 2), ("ff", 0)], 8),
        ([("3", 64)], 2),
    ],
)
def test_cores_of_the_ranks_of_a_host(each: list[tuple[str, int]], cores: int) -> None:
    assert cores_of_all(UsableCores(*every) for every in each) == cores


def test_cores_of_this_thread() -> None:
    assert int(UsableCores.of_this_thread().affinity, 16).bit_count() == len(os.sched_getaffinity(0))
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))
