"""Ranks as tasks of two executors: `local-cluster[2,1,1024]`, the smallest Spark that is a cluster."""

import importlib.util
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark import SparkContext
from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import SparkSession
from spark_archive import java_options

from farandole.errors import RankFailed, SlotsError
from farandole.spark import HorovodRunner, run, run_elastic
from farandole.spark.driver.messages import send
from farandole.spark.jobs.barrier import run_barrier_job
from farandole.spark.jobs.child import shard
from helpers.lost_driver import fit, kill_driver
from helpers.marked import wait_until_gone
from helpers.spark_elastic import expected_weight, place_of, training
from helpers.spark_faults import dying_in_an_allreduce, fit_with_faults
from helpers.spark_session import last_job, session, tasks_of
from system.launched import parent_of

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(180)]

needs_native = pytest.mark.skipif(importlib.util.find_spec("farandole._native") is None, reason="no native core")


@pytest.fixture(scope="module")
def work() -> Iterator[Path]:
    """Where Spark's local cluster puts the directories of its executors, unless told otherwise: beside its jars."""
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None and spec.origin is not None
    directory = Path(spec.origin).with_name("work")
    before = set(directory.glob("app-*"))
    yield directory
    for application in set(directory.glob("app-*")) - before:
        shutil.rmtree(application)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the executors keep what does not fit into memory, and the ranks' rows."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script by which the first of Spark's workers finds GPUs 5 and 7, the second one 6 and 8."""
    directory = tmp_path_factory.mktemp("gpus")
    script = directory / "discover"
    script.write_text(
        "#!/bin/sh\n"
        f"mkdir {directory}/5 2>/dev/null && numbers='5 7' || numbers='6 8'\n"
        """printf '{"name": "gpu", "addresses": ["%s", "%s"]}' $numbers\n"""
    )
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def spark(work: Path, disk: Path, gpus: Path) -> Iterator[SparkSession]:
    with session(
        "local-cluster[2,1,1024]",
        **{
            "spark.local.dir": str(disk),
            "spark.executor.extraJavaOptions": java_options(),
            "spark.worker.resource.gpu.amount": "2",
            "spark.worker.resource.gpu.discoveryScript": str(gpus),
            "spark.executor.resource.gpu.amount": "2",
            "spark.task.resource.gpu.amount": "1",
        },
    ) as started:
        yield started


def test_ranks_run_at_once_as_soon_as_the_session_is_there(spark: SparkSession, work: Path) -> None:
    """Executors of a cluster register after the session is ready: that is waited for, not refused."""

    def main() -> tuple[str, str, int]:
        print("heard in the executor's log")
        return os.environ["FARANDOLE_RANK"], os.environ["FARANDOLE_LOCAL_SIZE"], int(os.environ["OMP_NUM_THREADS"])

    values = run(main, num_proc=2, verbose=0)
    assert [value[:2] for value in values] == [("0", "2"), ("1", "2")]
    assert all(threads >= 1 for _, _, threads in values)
    logs = [log.read_text(errors="replace") for log in (work / spark.sparkContext.applicationId).glob("*/std*")]
    for rank in range(2):
        assert sum(f"[{rank}] heard in the executor's log" in log for log in logs) == 1


def test_local_ranks_find_their_gpus_by_their_number(spark: SparkSession) -> None:
    def main() -> tuple[str, list[str]]:
        from pyspark import TaskContext  # the rank is not the task: it knows its GPUs from its environment

        assert TaskContext.get() is None
        return os.environ["FARANDOLE_LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"].split(",")

    values = run(main, num_proc=2)
    assert [local_rank for local_rank, _ in values] == ["0", "1"]
    assert values[0][1] == values[1][1]
    assert sorted(values[0][1]) == ["5", "6"]


def test_ranks_of_one_task_divide_its_gpus(spark: SparkSession) -> None:
    def main() -> tuple[str, str, list[str]]:
        names = ("FARANDOLE_LOCAL_RANK", "FARANDOLE_LOCAL_SIZE", "CUDA_VISIBLE_DEVICES")
        local_rank, local_size, visible = (os.environ[name] for name in names)
        return local_rank, local_size, visible.split(",")

    two_gpus = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1).resource("gpu", 2)).build
    values = run(main, num_proc=4, resource_profile=two_gpus, ranks_per_task=2)
    assert [value[:2] for value in values] == [(str(rank), "4") for rank in range(4)]
    # Local ranks 0 and 1 are of one task, 2 and 3 of the other one.
    visible = values[0][2]
    assert sorted([visible[:2], visible[2:]]) == [["5", "7"], ["6", "8"]]
    assert all(value[2] == visible for value in values)
    with pytest.raises(SlotsError, match=r"6 ranks need 6 slots.* with 2 GPU per task of 2 ranks\) has 4"):
        HorovodRunner(np=6, resource_profile=two_gpus, ranks_per_task=2).run(main)


def test_too_many_ranks_are_refused_at_once(spark: SparkSession) -> None:
    started = time.monotonic()
    with pytest.raises(SlotsError, match=r"1 GPU per rank\) has 2"):
        HorovodRunner(np=3).run(print)
    assert time.monotonic() - started < 20


def test_a_profile_says_what_the_tasks_of_one_job_need(spark: SparkSession) -> None:
    def profile(cpus: int) -> ResourceProfile:
        return ResourceProfileBuilder().require(TaskResourceRequests().cpus(cpus)).build

    def main() -> tuple[str, str | None]:
        return os.environ["FARANDOLE_RANK"], os.environ.get("CUDA_VISIBLE_DEVICES")

    # The configuration's GPU for each task is not asked for.
    assert run(main, num_proc=2, resource_profile=profile(cpus=1)) == [("0", None), ("1", None)]
    with pytest.raises(SlotsError, match=r"2 ranks need 2 slots.* with 2 cores per rank\) has 0"):
        HorovodRunner(np=2, resource_profile=profile(cpus=2)).run(main)


@needs_native
def test_ranks_of_two_executors_average_a_gradient(spark: SparkSession) -> None:
    def main(factor: float) -> float:
        import numpy as np

        import farandole.numpy as hvd

        hvd.init()
        return float(hvd.allreduce(np.full(100_000, factor * hvd.rank()), name="gradient")[-1])

    assert HorovodRunner(np=2).run(main, factor=3.0) == 1.5


def test_a_failing_rank_is_the_task_that_failed(spark: SparkSession, mark: str) -> None:
    def main() -> None:
        import subprocess

        subprocess.Popen(["sleep", "60"])  # a helper that knows nothing of ranks
        if os.environ["FARANDOLE_RANK"] == "0":
            raise KeyError("the column that is not there")
        threading.Event().wait(100)

    with pytest.raises(RankFailed, match="the column that is not there") as caught:
        run(main, num_proc=2, env={"MARK": mark})
    assert isinstance(caught.value.__cause__, KeyError)
    assert wait_until_gone(mark, 20) == []
    tasks = tasks_of(spark, last_job(spark), count=2)
    assert (tasks[0]["status"], tasks[1]["status"]) == ("FAILED", "KILLED")
    assert "the column that is not there" in str(tasks[0]["errorMessage"])


@needs_native
def test_a_rank_killed_in_an_allreduce_is_the_one_to_blame(spark: SparkSession, mark: str) -> None:
    main = dying_in_an_allreduce(0)
    with pytest.raises(RankFailed, match="SIGKILL") as caught:
        run(main, num_proc=2, env={"MARK": mark})
    assert caught.value.rank == 0
    assert wait_until_gone(mark, 20) == []
    tasks = tasks_of(spark, last_job(spark), count=2)
    assert (tasks[0]["status"], tasks[1]["status"]) == ("FAILED", "KILLED")


def test_killing_a_python_worker_leaves_no_rank_and_no_rows(spark: SparkSession, disk: Path, mark: str) -> None:
    def main() -> None:
        assert shard() is not None
        send("started", {"pid": os.getpid()})
        threading.Event().wait(100)

    def kill_the_task(rank: int, message: dict[str, object]) -> None:
        if rank == 1:
            guard = parent_of(int(str(message["pid"])))
            os.kill(parent_of(guard), signal.SIGKILL)

    with pytest.raises(RankFailed) as caught:
        run_barrier_job(
            spark,
            main,
            num_proc=2,
            dataframe=spark.range(1000),
            description="killed",
            env={"MARK": mark},
            on_message=kill_the_task,
        )
    assert caught.value.rank == 1
    assert wait_until_gone(mark, 20) == []
    left = [name for _, directories, files in os.walk(disk) for name in directories + files if "farandole" in name]
    assert left == []


@needs_native
@pytest.mark.usefixtures("spark")
def test_an_elastic_job_goes_on_without_a_killed_executor_and_takes_in_the_next(tmp_path: Path) -> None:
    def kill_an_executor() -> None:
        try:
            pids = {place_of(tmp_path, rank=rank, size=2).pid for rank in range(2)}
            os.kill(an_executor(), signal.SIGKILL)
            left = place_of(tmp_path, rank=0, size=1).pid
            assert left in pids
            assert place_of(tmp_path, rank=0, size=2).pid == left
        finally:
            (tmp_path / "end").touch()

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_an_executor)
        values = run_elastic(training, [str(tmp_path)], num_proc=2, min_num_proc=1, verbose=0)
        killed.result()
    assert [value[:2] for value in values] == [(values[0][0], expected_weight(values[0][0]))] * 2


@needs_native
@pytest.mark.usefixtures("warm_torch")
@pytest.mark.timeout(400)
def test_a_fit_survives_a_killed_rank_and_a_killed_executor(spark: SparkSession, tmp_path: Path) -> None:
    fit_with_faults(spark, tmp_path)


@needs_native
@pytest.mark.usefixtures("warm_torch")
@pytest.mark.timeout(400)
def test_a_killed_driver_leaves_nothing_and_a_later_run_resumes(spark: SparkSession, tmp_path: Path, mark: str) -> None:
    import torch

    scratch, folder = tmp_path / "scratch", tmp_path / "runs"
    scratch.mkdir()
    folder.mkdir()
    said = kill_driver(folder, scratch, java_options(), mark)
    assert {each.name for each in folder.glob("hangs-*")} == {"hangs-0", "hangs-1"}, said
    assert wait_until_gone(mark, 30) == []
    left = [each for each in scratch.rglob("*") if "farandole" in each.name or each.suffix in (".parquet", ".arrow")]
    assert left == [] and not [each for each in os.listdir("/dev/shm") if "farandole" in each]

    done = (folder / "lost-0").stat().st_size
    straight, resumed = (fit(spark, folder, run_id) for run_id in ("straight", "lost"))
    whole, rest = (folder / "straight-0").stat().st_size, (folder / "lost-0").stat().st_size - done
    assert whole // 2 <= rest < whole - whole // 4, (whole, done, rest)  # the first epochs were not run again
    assert [each["loss"] for each in resumed.history] == [each["loss"] for each in straight.history]
    for one, other in zip(straight.getModel().parameters(), resumed.getModel().parameters(), strict=True):
        assert torch.equal(one, other)


def an_executor() -> int:
    """Return the process of an executor, which the local cluster runs below the session's own Java."""
    gateway = SparkContext._gateway
    assert gateway is not None
    children = Path(f"/proc/{gateway.proc.pid}/task").glob("*/children")
    pids = [pid for threads in children for pid in threads.read_text().split()]
    return int(next(pid for pid in pids if Path(f"/proc/{pid}/comm").read_text() == "java\n"))
