"""Ranks on a standalone cluster: a master and a worker of Spark's own, with two executors."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from py4j.protocol import Py4JJavaError
from pyspark.resource import ResourceProfile
from pyspark.resource.requests import TaskResourceRequest
from pyspark.sql import SparkSession
from spark_archive import java_options

from farandole.errors import SlotsError
from farandole.spark import HorovodRunner
from farandole.spark.jobs.classic import ClassicApplication
from helpers.spark_faults import fit_with_faults
from helpers.spark_servers import standalone_cluster
from helpers.spark_session import end_local_session, session

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(
        "FARANDOLE_TEST_STANDALONE" not in os.environ,
        reason="a minute and a half: FARANDOLE_TEST_STANDALONE=1 asks for it; local-cluster has the same scheduler",
    ),
]

needs_native = pytest.mark.skipif(importlib.util.find_spec("farandole._native") is None, reason="no native core")


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    end_local_session()
    folder = tmp_path_factory.mktemp("standalone")
    settings = {
        "spark.executor.instances": "2",  # that are waited for, however slow the machine is
        "spark.executor.cores": "1",
        "spark.executor.memory": "1g",
        "spark.local.dir": str(folder),
        "spark.executor.extraJavaOptions": java_options(),
    }
    with standalone_cluster(folder, cores=2) as master, session(master, **settings) as started:
        yield started


@needs_native
def test_ranks_of_two_executors_average(spark: SparkSession) -> None:
    def main(factor: float) -> float:
        import numpy as np

        import farandole.numpy as hvd

        hvd.init()
        return float(hvd.allreduce(np.full(100_000, factor * hvd.rank()), name="gradient")[-1])

    assert HorovodRunner(np=2).run(main, factor=3.0) == 1.5
    with pytest.raises(SlotsError, match=r"3 ranks need 3 slots, but Spark \(spark://127.0.0.1:\d+\) has 2"):
        HorovodRunner(np=3).run(main, factor=3.0)


def test_counting_slots_registers_a_profile_once(spark: SparkSession) -> None:
    profile = ResourceProfile(_task_req={"cpus": TaskResourceRequest("cpus", 1.0)})  # as from before the session
    for _ in range(3):
        assert ClassicApplication(spark).slots(1, profile) in (0, 1, 2)  # as executors register
    assert len(profiles_of(spark)) == 2, "Spark's own one, and that of the tasks"


def profiles_of(spark: SparkSession) -> list[int]:
    manager = spark.sparkContext._jsc.sc().resourceProfileManager()
    found = []
    for number in range(100):
        with suppress(Py4JJavaError):  # not registered
            found.append(manager.resourceProfileFromId(number).id())
    return found


@needs_native
@pytest.mark.usefixtures("warm_torch")
@pytest.mark.timeout(400)
def test_a_fit_survives_a_killed_rank_and_a_killed_executor(spark: SparkSession, tmp_path: Path) -> None:
    fit_with_faults(spark, tmp_path)
