"""Spark sessions for tests, and reports of Spark and of the machine about the jobs in them."""

import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from helpers.programs import warm_spark

__all__ = ["end_local_session", "last_job", "local_session", "session", "tasks_of"]

LOCALHOST = "127.0.0.1"

_local: ExitStack | None = None  # the session that `local_session` has started in this process


@contextmanager
def local_session() -> Iterator[SparkSession]:
    """Yield a session on local[2], which all modules of this process share: starting one takes ten seconds.

    It keeps all its files, and an event log, below its "spark.local.dir".
    """
    global _local
    if _local is None:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="farandole-spark-"))
            events = Path(folder, "events")
            events.mkdir()
            settings = {
                "spark.local.dir": folder,
                "spark.eventLog.enabled": "true",
                "spark.eventLog.dir": events.as_uri(),
                "spark.eventLog.compress": "false",
                "spark.sql.session.timeZone": "UTC",
                "spark.stage.maxConsecutiveAttempts": "2",  # for the tests that lose a keeper twice
            }
            stack.callback(_stop, _start("local[2]", settings))
            _local = stack.pop_all()
    with _environment():
        yield SparkSession.builder.getOrCreate()


def end_local_session() -> None:
    """End the session that modules share, if there is one."""
    global _local
    if _local is not None:
        _local.close()
        _local = None


@contextmanager
def session(master: str, **settings: str) -> Iterator[SparkSession]:
    """Start a session of one module on `master` and stop it; only one can live in a process."""
    end_local_session()
    with _environment():
        spark = _start(master, settings)
        try:
            yield spark
        finally:
            _stop(spark)


@contextmanager
def _environment() -> Iterator[None]:
    variables = warm_spark("any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", LOCALHOST)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def _start(master: str, settings: Mapping[str, str]) -> SparkSession:
    builder = SparkSession.builder.master(master).appName("farandole tests")
    for name, value in {
        "spark.driver.host": LOCALHOST,
        "spark.driver.bindAddress": LOCALHOST,
        "spark.ui.enabled": "true",  # for its REST interface
        "spark.ui.port": "0",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",
        "spark.sql.shuffle.partitions": "2",
        # Until the Python worker of a killed task is gone, the task's thread spins.
        "spark.python.task.killTimeout": "200ms",
        **settings,
    }.items():
        builder = builder.config(name, value)
    with _environment():
        return builder.getOrCreate()


def _stop(spark: SparkSession) -> None:
    spark.stop()
    end_java()


def end_java() -> None:
    """End Spark's Java process: the next session would inherit the settings that it was started with."""
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    process = gateway.proc
    process.stdin.close()
    process.wait(30)
    SparkContext._gateway = SparkContext._jvm = None


def rest(spark: SparkSession, path: str) -> list[dict[str, object]]:
    """Ask Spark's REST interface about this application; its first answer takes long on a busy machine."""
    url = f"{spark.sparkContext.uiWebUrl}/api/v1/applications/{spark.sparkContext.applicationId}/{path}"
    with urllib.request.urlopen(url, timeout=100) as answer:
        found: list[dict[str, object]] = json.load(answer)
        return found


def last_job(spark: SparkSession) -> dict[str, object]:
    """The job that was submitted last, once Spark's bookkeeping says that it has ended."""
    deadline = time.monotonic() + 60
    while True:
        job = max(rest(spark, "jobs"), key=lambda each: int(str(each["jobId"])))
        if job["status"] != "RUNNING" or time.monotonic() > deadline:
            return job
        time.sleep(0.1)


def tasks_of(spark: SparkSession, job: dict[str, object], *, count: int) -> dict[int, dict[str, object]]:
    """The tasks of the job's last stage by their index, once `count` of them have ended."""
    stages = job["stageIds"]
    assert isinstance(stages, list)
    deadline = time.monotonic() + 60
    while True:
        tasks = {int(str(task["index"])): task for task in rest(spark, f"stages/{max(stages)}/0/taskList")}
        ended = [task for task in tasks.values() if task["status"] != "RUNNING"]
        if len(ended) == count or time.monotonic() > deadline:
            return tasks
        time.sleep(0.1)
