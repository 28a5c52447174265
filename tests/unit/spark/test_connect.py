"""Facts of a Spark Connect session, whose server tells less than a SparkContext knows."""

import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

from farandole.errors import ConfigError, SlotsError
from farandole.spark.jobs import connect, interpreter
from farandole.spark.jobs.application import is_connect
from farandole.spark.jobs.chosen import application_of
from farandole.spark.jobs.connect import ConnectApplication, candidates
from farandole.spark.jobs.interpreter import interpreter_error, use_own_interpreter
from farandole.spark.jobs.slots import all_slots, require_slots
from farandole.topology import own_addresses


def session(splits: str = "splits=8", **settings: str) -> Any:
    """Make a stand-in for a Connect session, which has no attribute `sparkContext`."""
    made = type("SparkSession", (SimpleNamespace,), {"__module__": "pyspark.sql.connect.session"})()
    plan = f"== Physical Plan ==\n*(1) Range (0, 1, step=1, {splits})\n"
    made.is_stopped = False
    made.range = lambda end: SimpleNamespace(_explain_string=lambda: plan)
    made.conf = SimpleNamespace(
        get=lambda name: {"spark.master": "yarn"}[name], getAll={"spark.task.cpus": "2"} | settings
    )
    return made


@pytest.mark.parametrize("splits", ["splits=8", "splits=Some(8)"])
def test_slots_come_from_the_partitions_of_a_range(splits: str) -> None:
    application = application_of(session(splits))
    assert isinstance(application, ConnectApplication)
    assert application.parallelism() == 8
    assert application.slots(3, None) == 2


@pytest.mark.parametrize(
    "setting", ["spark.default.parallelism", "spark.sql.leafNodeDefaultParallelism", "spark.task.resource.gpu.amount"]
)
def test_slots_that_the_server_does_not_tell_are_unknown(setting: str, caplog: pytest.LogCaptureFixture) -> None:
    unknown: dict[str, str] = {setting: "1"}
    spark = session(**unknown)
    assert ConnectApplication(spark).slots(2, None) is None
    require_slots(spark, 64, patience=timedelta(0))
    assert "64 ranks" in caplog.text
    with pytest.raises(ConfigError, match="num_proc: must be given"):
        all_slots(spark, patience=timedelta(0))
    promised = session(**unknown, **{"spark.executor.instances": "3", "spark.executor.cores": "8"})
    assert all_slots(promised, patience=timedelta(0)) == 12
    with pytest.raises(SlotsError, match=r"13 slots, .* has 12"):
        require_slots(promised, 13, patience=timedelta(0))


def test_the_gpus_of_a_profile_are_not_counted_either() -> None:
    requests = TaskResourceRequests().cpus(2)
    assert ConnectApplication(session()).slots(2, ResourceProfileBuilder().require(requests).build) == 4
    assert (
        ConnectApplication(session()).slots(2, ResourceProfileBuilder().require(requests.resource("gpu", 1)).build)
        is None
    )


def test_a_session_may_be_stopped_while_its_job_runs() -> None:
    spark, done = session(), list[str]()
    spark.addTag, spark.removeTag = done.append, done.append
    spark.interruptTag = lambda group: done.append("interrupted")
    with ConnectApplication(spark).job_group("group", "description") as cancel:
        spark.is_stopped = True
        cancel()
    assert done == ["group", "group"]


def test_its_settings_are_asked_for() -> None:
    application = application_of(session())
    assert application.master == "yarn"
    assert application.settings["spark.task.cpus"] == "2"
    assert not application.shares_terminal


def test_this_machine_is_looked_for_on_the_way_to_the_server_first() -> None:
    loopback, *others = own_addresses()
    assert candidates("127.0.0.1") == list(dict.fromkeys(["127.0.0.1", *others, loopback]))
    assert candidates("no-such-host.invalid") == [*others, loopback]
    assert candidates("no-such-host.invalid", "no-such-interface") == [*others, loopback]
    assert candidates("no-such-host.invalid", "lo")[0] == "127.0.0.1"


def test_a_search_ends_in_time_although_a_request_to_cancel_it_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connect, "INTERRUPT_EVERY", 0.01)
    cancelled, answers = threading.Event(), iter([ConnectionError("no server"), None])

    def interrupt(tag: str) -> None:
        error = next(answers, None)
        if error is not None:
            raise error
        cancelled.set()

    spark = SimpleNamespace(addTag=lambda tag: None, removeTag=lambda tag: None, interruptTag=interrupt)
    with pytest.raises(ConfigError, match="start_timeout: no executor"), connect._limited(spark, timedelta(0)):
        assert cancelled.wait(10)
        raise RuntimeError("cancelled")
    assert "no server" in caplog.text


def test_a_function_of_the_dataframe_may_have_another_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setattr(interpreter, "is_connect", lambda _: False)
    monkeypatch.setattr(interpreter, "application_of", lambda _: SimpleNamespace(python=sys.executable))
    told = str(interpreter_error(session(), "ModuleNotFoundError: No module named 'pyarrow'"))
    assert told.startswith(
        "PYSPARK_PYTHON: the Python of Spark's tasks, python3 (for which a UDF of the DataFrame was made), has no "
        "pyarrow; the variable is not set. Before the session starts, set it to a Python"
    )


def test_a_server_whose_python_lacks_farandole_is_told_of_with_the_remedy() -> None:
    spark = session()
    assert is_connect(spark)
    use_own_interpreter(spark)  # has nothing to change there
    version = ".".join(map(str, sys.version_info[:2]))
    told = str(interpreter_error(spark, "ModuleNotFoundError: No module named 'farandole'"))
    assert told == (
        "PYSPARK_PYTHON: the Python of Spark's tasks, PYSPARK_PYTHON of the Spark Connect server, has no farandole. "
        f"Set the variable where the server starts, to a Python {version} with farandole that all executors have"
    )
