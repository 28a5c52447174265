"""Where a session is found, and where none is started."""

import os

import pytest

pytest.importorskip("pyspark")

from pyspark import TaskContext
from pyspark.sql import SparkSession

from farandole.errors import ConfigError
from farandole.spark.jobs import session

RANK = {
    "FARANDOLE_RANK": "1",
    "FARANDOLE_SIZE": "4",
    "FARANDOLE_RENDEZVOUS": "127.0.0.1:9",
    "FARANDOLE_SECRET": "00" * 16,
}


class Task:
    @staticmethod
    def partitionId() -> int:
        return 3


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)


@pytest.mark.parametrize("ask", [session.started_session, session.active_session])
def test_ranks_and_tasks_start_no_session(ask: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(ask)
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {**os.environ, **RANK})
        with pytest.raises(ConfigError, match="this process is rank 1 of 4, which has no Spark session; call this on"):
            ask()
    monkeypatch.setattr(TaskContext, "get", Task)
    with pytest.raises(ConfigError, match="this process is the task of partition 3 of a Spark job, which has no Spark"):
        ask()
