"""Elastic jobs in random schedules: no hang, no lost commit, each row once, and the same numbers on all ranks.

FARANDOLE_TEST_SCHEDULES is the number of seeds, FARANDOLE_TEST_SEED the first one, at random by default."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.ssh_hosts import Hosts, problem, serving_hosts
from system.elastic_schedules import ROWS, follow

pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

pytestmark = [pytest.mark.native, pytest.mark.timeout(240)]

COUNT = int(os.environ.get("FARANDOLE_TEST_SCHEDULES", "4"))
FIRST = int(os.environ.get("FARANDOLE_TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 30)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with serving_hosts(tmp_path_factory.mktemp("ssh")) as hosts:
        yield hosts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"x": list(range(ROWS))}), tmp_path / "rows.parquet")
    return tmp_path


@pytest.mark.parametrize("number", range(COUNT))
def test_on_one_machine(folder: Path, number: int) -> None:
    follow(folder, FIRST + number)


@pytest.mark.slow
@pytest.mark.skipif(bool(problem()), reason=problem() or "hosts")
@pytest.mark.parametrize("number", range(COUNT))
def test_on_hosts(hosts: Hosts, folder: Path, number: int) -> None:
    follow(folder, FIRST + number, hosts)
