"""A Spark session for the tests of one module, and what Spark and the machine say about the jobs in it."""

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

__all__ = ["last_job", "session", "tasks_of"]

LOCALHOST = "127.0.0.1"


@contextmanager
def session(master: str, **settings: str) -> Iterator[SparkSession]:
    """Start a session on `master` and stop it; only one can live in a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", LOCALHOST)
        builder = SparkSession.builder.master(master).appName("farandole tests")
        for name, value in {
            "spark.driver.host": LOCALHOST,
            "spark.driver.bindAddress": LOCALHOST,
            "spark.ui.enabled": "true",  # for its REST interface
            "spark.ui.port": "0",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "OFF",
            "spark.sql.shuffle.partitions": "2",
            **settings,
        }.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        try:
            yield spark
        finally:
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
    """Ask Spark's REST interface about this application."""
    url = f"{spark.sparkContext.uiWebUrl}/api/v1/applications/{spark.sparkContext.applicationId}/{path}"
    with urllib.request.urlopen(url, timeout=30) as answer:
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
