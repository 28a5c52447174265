"""Spark sessions for tests, and Spark's reports about their jobs."""

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

LOCALHOST = "127.0.0.1"

_local: ExitStack | None = None  # the session of `local_session` in this process


@contextmanager
def local_session() -> Iterator[SparkSession]:
    """Yield a session on local[2], which all modules of this process share, because starting one takes ten seconds.

    All its files, and an event log, are below its "spark.local.dir".
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
                "spark.stage.maxConsecutiveAttempts": "2",  # some tests lose a keeper twice
            }
            stack.callback(_stop, _start("local[2]", settings))
            _local = stack.pop_all()
    with _environment():
        yield SparkSession.builder.getOrCreate()


def end_local_session() -> None:
    """End the session that modules share, if any."""
    global _local
    if _local is not None:
        _local.close()
        _local = None


@contextmanager
def session(master: str, **settings: str) -> Iterator[SparkSession]:
    """Yield a new session on `master`, and stop it afterwards. A process can have one session at a time."""
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
        # The thread of a killed task spins until its Python worker is gone.
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
    """End Spark's Java process, from which the next session would inherit settings."""
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    process = gateway.proc
    process.stdin.close()
    process.wait(30)
    SparkContext._gateway = SparkContext._jvm = None


def rest(spark: SparkSession, path: str) -> list[dict[str, object]]:
    """Return an answer of Spark's REST API about this application. The first answer may take long on a busy machine."""
    url = f"{spark.sparkContext.uiWebUrl}/api/v1/applications/{spark.sparkContext.applicationId}/{path}"
    with urllib.request.urlopen(url, timeout=100) as answer:
        found: list[dict[str, object]] = json.load(answer)
        return found


def last_job(spark: SparkSession) -> dict[str, object]:
    """Return the job that was submitted last, after Spark's status store reports its end (60 s at most)."""
    deadline = time.monotonic() + 60
    while True:
        job = max(rest(spark, "jobs"), key=lambda each: int(str(each["jobId"])))
        if job["status"] != "RUNNING" or time.monotonic() > deadline:
            return job
        time.sleep(0.1)


def tasks_of(spark: SparkSession, job: dict[str, object], *, count: int) -> dict[int, dict[str, object]]:
    """Return the tasks of the job's last stage by index, after `count` of them have ended (60 s at most)."""
    stages = job["stageIds"]
    assert isinstance(stages, list)
    deadline = time.monotonic() + 60
    while True:
        tasks = {int(str(task["index"])): task for task in rest(spark, f"stages/{max(stages)}/0/taskList")}
        ended = [task for task in tasks.values() if task["status"] != "RUNNING"]
        if len(ended) == count or time.monotonic() > deadline:
            return tasks
        time.sleep(0.1)
