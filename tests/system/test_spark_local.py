"""Ranks as tasks of a Spark job whose driver runs them itself: `local[2]`."""

import functools
import importlib
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
import pyspark
from pyspark.sql import SparkSession

from farandole.errors import ConfigError, PicklingError, RankFailed, SlotsError
from farandole.spark import HorovodRunner, JobCancelled, log_to_driver, run
from farandole.spark.driver.messages import send
from farandole.spark.jobs.barrier import run_barrier_job
from farandole.spark.jobs.child import shard
from helpers.marked import processes_with, wait_until_gone
from helpers.spark_faults import dying_in_an_allreduce, interrupt_job, restart_after_a_kill
from helpers.spark_session import last_job, tasks_of

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]

needs_native = pytest.mark.skipif(importlib.util.find_spec("farandole._native") is None, reason="no native core")


HANGS = 100  # seconds: a rank that nobody ends


def test_rank_zeros_value_comes_back_and_the_drivers_settings_go_there(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "4096")
    monkeypatch.setenv("FARANDOLE_RANK", "7")  # of the driver, if it is one itself
    monkeypatch.setenv("SECRET_OF_THE_DRIVER", "x")

    def main(factor: int) -> object:
        rank = int(os.environ["FARANDOLE_RANK"])
        if rank:
            return threading.Lock()  # only rank 0's value has to travel
        names = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", "HOROVOD_FUSION_THRESHOLD")
        return factor * 2, [os.environ[name] for name in names], "SECRET_OF_THE_DRIVER" in os.environ

    assert HorovodRunner(np=2).run(main, factor=21) == (42, ["0", "2", "2", "4096"], False)
    job = last_job(spark)
    assert job["description"] == "HorovodRunner: main"
    assert str(job["jobGroup"]).startswith("farandole-")
    assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") is None


def test_run_brings_all_values_in_rank_order(spark: SparkSession) -> None:
    def main(a: int, *, b: int) -> tuple[int, str, int, str]:
        return a + b, os.environ["FARANDOLE_RANK"], os.getppid(), os.environ["MINE"]

    values = run(main, (1,), {"b": 2}, num_proc=2, env={"MINE": "yes"})
    assert [value[:2] + value[3:] for value in values] == [(3, "0", "yes"), (3, "1", "yes")]
    assert values[0][2] != values[1][2]


def test_a_failing_rank_is_the_task_that_failed(spark: SparkSession, mark: str) -> None:
    class Mine(Exception):
        pass

    def main() -> None:
        if os.environ["FARANDOLE_RANK"] == "1":
            print("last words")
            raise Mine("in the middle of training")
        threading.Event().wait(HANGS)

    started = time.monotonic()
    with pytest.raises(RankFailed, match="in the middle of training") as caught:
        run(main, num_proc=2, env={"MARK": mark})
    assert time.monotonic() - started < HANGS
    assert wait_until_gone(mark, 20) == []

    assert caught.value.rank == 1
    assert type(caught.value.__cause__).__name__ == "Mine"
    assert "in main" in caught.value.traceback
    assert "last words" in caught.value.tail
    assert len(str(caught.value).splitlines()) < 30
    assert "scala" not in str(caught.value)

    tasks = tasks_of(spark, last_job(spark), count=2)
    assert tasks[1]["status"] == "FAILED"
    assert "Mine: in the middle of training" in str(tasks[1]["errorMessage"])
    assert "in main" in str(tasks[1]["errorMessage"])
    assert tasks[0]["status"] == "KILLED"


@needs_native
def test_a_rank_killed_in_an_allreduce_is_the_one_to_blame(spark: SparkSession, mark: str) -> None:
    main = dying_in_an_allreduce(1)
    with pytest.raises(RankFailed, match="SIGKILL") as caught:
        run(main, num_proc=2, env={"MARK": mark})
    assert caught.value.rank == 1
    assert wait_until_gone(mark, 20) == []
    tasks = tasks_of(spark, last_job(spark), count=2)
    assert (tasks[1]["status"], tasks[0]["status"]) == ("FAILED", "KILLED")
    assert "SIGKILL" in str(tasks[1]["errorMessage"])


@needs_native
@pytest.mark.parametrize("size", [0, 3 << 20], ids=["small call", "large call"])
def test_no_file_of_spark_holds_the_secret(spark: SparkSession, scratch: Path, size: int) -> None:
    def main(ballast: bytes, folder: str) -> tuple[bool, list[str]]:
        secret = bytes.fromhex(os.environ["FARANDOLE_SECRET"])
        held = {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
        found = [str(path) for path, data in held.items() if secret in data or secret.hex().encode() in data]
        return any(ballast[:64] in data for data in held.values()), found

    ballast = os.urandom(size)
    ((holds_the_call, found),) = run_barrier_job(spark, main, (ballast, str(scratch)), num_proc=1, description="search")
    assert found == []
    assert holds_the_call  # so the search sees what Spark writes


def test_ranks_find_each_other(spark: SparkSession) -> None:
    def main() -> tuple[int, int, int, float]:
        import numpy as np

        import farandole.numpy as hvd

        hvd.init()
        mean = hvd.allreduce(np.array([float(hvd.rank())]), name="rank")
        return hvd.rank(), hvd.size(), hvd.local_rank(), float(mean[0])

    assert run(main, num_proc=2) == [(0, 2, 0, 0.5), (1, 2, 1, 0.5)]


def test_more_ranks_than_slots_are_refused_before_anything_starts(spark: SparkSession) -> None:
    started = time.monotonic()
    with pytest.raises(SlotsError, match=r"8 ranks need 8 slots, but Spark \(local\[2\]\) has 2"):
        HorovodRunner(np=8).run(print)
    assert time.monotonic() - started < 20


def test_all_slots(spark: SparkSession) -> None:
    def main() -> int:
        return int(os.environ["FARANDOLE_SIZE"])

    with pytest.warns(DeprecationWarning, match="np=0"):
        assert HorovodRunner(np=0).run(main) == 2


def test_a_function_that_cannot_be_sent_is_named(spark: SparkSession) -> None:
    lock = threading.Lock()

    def main() -> object:
        return lock

    with pytest.raises(PicklingError, match="'lock'"):
        HorovodRunner(np=2).run(main)


def test_messages_always_arrive_and_lines_when_asked_for(
    spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    def main(word: str) -> None:
        print(f"a {word} line")
        log_to_driver(f"message {os.environ['FARANDOLE_RANK']} " + "x" * 5000)

    HorovodRunner(np=2).run(main, word="quiet")
    quiet = capfd.readouterr()
    HorovodRunner(np=2, driver_log_verbosity="all").run(main, word="loud")
    loud = capfd.readouterr()
    for shown in (quiet.out, loud.out):
        messages = sorted(line for line in shown.splitlines() if "message" in line)
        assert [len(message) for message in messages] == [4004, 4004]  # cut, behind "[0] "
        assert messages[1].startswith("[1] message 1 x")
    assert "a quiet line" not in quiet.out
    assert sorted(line for line in loud.out.splitlines() if "line" in line) == ["[0] a loud line", "[1] a loud line"]
    assert "The pickled object size is" in quiet.err
    assert "The global names read or written to by the pickled function are {log_to_driver, os}." in quiet.err


def test_local_ranks_run_without_spark(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(SparkSession.builder, "getOrCreate", None)

    def main(x: int) -> object:
        log_to_driver("from a local rank")
        return (x, os.environ["FARANDOLE_SIZE"]) if os.environ["FARANDOLE_RANK"] == "0" else threading.Lock()

    assert HorovodRunner(np=-2).run(main, x=5) == (5, "2")
    assert capfd.readouterr().out.count("from a local rank") == 2


class Counted:
    """Counts how often it is pickled; on a rank it returns the number of ranks."""

    pickled = 0

    def __call__(self) -> object:
        raise AssertionError("ranks get the partial")

    def __reduce__(self) -> tuple[object, ...]:
        self.pickled += 1
        return functools.partial, (os.getenv, "FARANDOLE_SIZE")


@pytest.mark.parametrize("np", [-2, 2])
def test_a_call_is_pickled_once(spark: SparkSession, np: int) -> None:
    main = Counted()
    assert HorovodRunner(np=np).run(main) == "2"
    assert main.pickled == 1


def test_each_rank_reads_the_rows_of_its_partition(spark: SparkSession, tmp_path: Path) -> None:
    def main() -> tuple[int, list[int]]:
        path = shard()
        assert path is not None
        send("progress", {"step": 1, "of": 2})
        with pa.memory_map(str(path)) as mapped:
            table = pa.ipc.open_stream(mapped).read_all()
        return table.num_rows, table.column("id").to_pylist()

    heard: list[tuple[int, object]] = []
    values = run_barrier_job(
        spark,
        main,
        num_proc=2,
        dataframe=spark.range(0, 1000, 1, 5).repartition(2),
        description="rows",
        on_message=lambda rank, message: heard.append((rank, message)),
    )
    assert sum(rows for rows, _ in values) == 1000
    assert sorted(values[0][1] + values[1][1]) == list(range(1000))
    assert sorted(heard, key=str) == [(rank, {"kind": "progress", "step": 1, "of": 2}) for rank in range(2)]


@pytest.mark.parametrize("rows", [0, 1])
def test_a_rank_without_rows_still_has_the_columns(spark: SparkSession, rows: int) -> None:
    def main() -> tuple[int, list[str]]:
        path = shard()
        assert path is not None
        with pa.memory_map(str(path)) as mapped:
            table = pa.ipc.open_stream(mapped).read_all()
        return table.num_rows, table.column_names

    few = spark.createDataFrame([(1, "a")], "n long, s string").limit(rows)
    values = run_barrier_job(spark, main, num_proc=2, dataframe=few, description="few rows")
    assert sorted(values) == [(0, ["n", "s"]), (rows, ["n", "s"])]


def test_a_failing_query_is_not_blamed_on_a_rank(spark: SparkSession, mark: str) -> None:
    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            raise ArithmeticError("the query's own")
        yield from ()

    broken = spark.range(10).mapInArrow(fail, "id long")
    with pytest.raises(Exception, match="the query's own") as caught:
        run_barrier_job(spark, print, num_proc=2, dataframe=broken, description="broken", env={"MARK": mark})
    assert not isinstance(caught.value, RankFailed)
    assert wait_until_gone(mark, 20) == []


@pytest.mark.skipif(
    pyspark.__version__.startswith("4.0."), reason="PySpark 4.0 calls Spark within a call on Ctrl-C: a Py4JError"
)
def test_ctrl_c_ends_the_ranks(spark: SparkSession, mark: str, caplog: pytest.LogCaptureFixture) -> None:
    interrupt_job(spark, mark)
    assert last_job(spark)["status"] == "FAILED"
    assert "while sending command" not in caplog.text, "py4j shows traces"


def test_a_task_that_fails_beside_its_rank_says_why(spark: SparkSession, mark: str) -> None:
    with pytest.raises(RankFailed, match="no-such-interface") as caught:
        run(print, num_proc=2, env={"MARK": mark, "FARANDOLE_INTERFACE": "no-such-interface"})
    assert isinstance(caught.value.__cause__, ConfigError)
    assert caught.value.rank == 0
    assert wait_until_gone(mark, 20) == []


@pytest.fixture
def bare_python(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give Spark's tasks a Python that has no packages."""
    python = tmp_path / "bare-python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    return python


def test_a_local_master_runs_the_drivers_python(
    spark: SparkSession, bare_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON")
    assert run(lambda: os.environ["FARANDOLE_SIZE"], num_proc=1) == ["1"]


def test_a_local_master_finds_modules_beside_the_script(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_script.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {name: value for name, value in spark.sparkContext.environment.items() if name != "PYTHONPATH"}
    monkeypatch.setattr(spark.sparkContext, "environment", given)

    def main() -> int:
        return int(importlib.import_module("beside_the_script").VALUE)

    assert run(main, num_proc=1) == [7]


def test_a_python_without_farandole_is_named_with_the_remedy(spark: SparkSession, bare_python: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run(print, num_proc=1)
    assert str(caught.value).startswith(f"PYSPARK_PYTHON: the Python of Spark's tasks, {bare_python}, has no ")
    assert f"(here {sys.executable})" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_killed_rank_is_started_again_with_all_others(spark: SparkSession, tmp_path: Path, mark: str) -> None:
    restart_after_a_kill(spark, tmp_path, mark)
    assert last_job(spark)["status"] == "SUCCEEDED"


def test_an_exception_ends_the_run(spark: SparkSession, tmp_path: Path, mark: str) -> None:
    def main() -> None:
        if os.environ["FARANDOLE_RANK"] == "1":
            with (tmp_path / "attempts").open("a") as attempts:
                attempts.write("attempt\n")
            raise KeyError("the same every time")
        threading.Event().wait(HANGS)

    with pytest.raises(RankFailed, match="rank 1 failed: KeyError: 'the same every time'") as caught:
        run_barrier_job(spark, main, num_proc=2, description="hopeless", env={"MARK": mark}, max_attempts=9)
    assert caught.value.earlier == ()
    assert isinstance(caught.value.__cause__, KeyError)
    assert (tmp_path / "attempts").read_text().count("attempt") == 1
    assert wait_until_gone(mark, 20) == []


def test_a_new_spark_job_follows_when_spark_gives_up(spark: SparkSession, tmp_path: Path) -> None:
    assert spark.sparkContext.getConf().get("spark.stage.maxConsecutiveAttempts") == "2"

    def main() -> None:
        with (tmp_path / "attempts").open("a") as attempts:
            attempts.write("attempt\n")
        os.kill(os.getpid(), signal.SIGKILL)

    told = "rank 0 failed: was killed by SIGKILL"
    with pytest.raises(RankFailed, match=rf"(?s)in attempt 3: .*attempt 1: {told}.*attempt 2: {told}"):
        run_barrier_job(spark, main, num_proc=1, description="killed for good", max_attempts=3)
    assert (tmp_path / "attempts").read_text().count("attempt") == 3


def test_a_job_cancelled_in_spark_ends_the_ranks(spark: SparkSession, mark: str) -> None:
    def main() -> None:
        send("started", {})
        threading.Event().wait(HANGS)

    def cancel(rank: int, message: dict[str, object]) -> None:
        spark.sparkContext.cancelAllJobs()

    with pytest.raises(JobCancelled, match=r"ranks have ended \(Job \d+ cancelled.*\); run it again") as caught:
        run_barrier_job(spark, main, num_proc=2, description="cancelled", env={"MARK": mark}, on_message=cancel)
    assert not isinstance(caught.value, RankFailed)
    assert wait_until_gone(mark, 20) == []


def test_a_rank_that_cannot_start_says_so(spark: SparkSession) -> None:
    with pytest.raises(RankFailed, match="/nowhere/python"):
        run(print, num_proc=2, executable="/nowhere/python", start_timeout=20)


@pytest.mark.parametrize("np", [1.0, "2", None, True])
def test_np_is_a_whole_number(np: object) -> None:
    with pytest.raises(TypeError, match="np must be a whole number"):
        HorovodRunner(np=np)  # type: ignore[arg-type]


def test_wrong_arguments_are_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="driver_log_verbosity"):
        HorovodRunner(np=2, driver_log_verbosity="loud")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        HorovodRunner(2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="num_proc"):
        run_barrier_job(spark, print, num_proc=0, description="none", start_timeout=timedelta(seconds=1))
    with pytest.raises(ConfigError, match="FUSION_THRESHOLD"):
        run(print, num_proc=2, env={"HOROVOD_FUSION_THRESHOLD": "many"})
    with pytest.raises(ConfigError, match="MPI"):
        run(print, use_mpi=True)
    assert processes_with("no such mark") == []
