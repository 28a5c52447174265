"""Interface to the Spark application of a session, classic or Spark Connect."""

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame, SparkSession

from farandole.errors import ConfigError
from farandole.spark.jobs.plan import TaskOrders, TaskPlan

_CONNECT = "pyspark.sql.connect."
_LOCAL = re.compile(r"local(\[.*\])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverHost:
    """The address at which this process listens for tasks, and the name by which they find it."""

    bind: str
    name: str
    setting: str  # the setting to blame if this process cannot listen there


class Application(Protocol):
    """A Spark application, for the code that starts ranks."""

    @property
    def master(self) -> str:
        """The master URL that the application was started with."""

    @property
    def settings(self) -> Mapping[str, str]:
        """The application's configuration."""

    @property
    def python(self) -> str:
        """The Python of the tasks, as far as this process knows it."""

    @property
    def shares_terminal(self) -> bool:
        """True if tasks write to the terminal of this process."""

    def parallelism(self) -> int:
        """Return Spark's default parallelism."""

    def slots(self, task_cpus: int, profile: ResourceProfile | None) -> int | None:
        """Return how many tasks can run at once now, each with `task_cpus` cores and the resources of `profile`.

        None: that is not known."""

    def driver_host(self, interface: str, patience: timedelta) -> DriverHost:
        """Return the address at which to listen for tasks; may run a Spark job that tries addresses, up to `patience`.

        Raises `ConfigError` if tasks reach no address of this machine, or if no executor has started by then."""

    def attempt_of(self, stage: int) -> int:
        """Return the number of the stage's newest attempt, from 1; 0 for an unknown stage."""

    def has_failed(self, stage: int, attempt: int) -> bool:
        """Return whether Spark has noticed that a task of the attempt has failed; False if that is not known."""

    def job_group(self, group: str, description: str) -> AbstractContextManager[Callable[[], None]]:
        """Give this thread's Spark jobs of the block a group and a description; yields a function that cancels them."""

    def handed_over(self, plan: TaskPlan, secret: bytes) -> AbstractContextManager[TaskOrders]:
        """Yield the orders for the tasks of the block, which carry the plan or a broadcast of it."""

    def repartitioned_to(self, dataframe: DataFrame) -> int | None:
        """Return the number of partitions if the last step of `dataframe` repartitions it, else None."""


def is_connect(spark: object) -> bool:
    """Return whether `spark` is a Spark Connect session."""
    return type(spark).__module__.startswith(_CONNECT)


def is_stopped(spark: Any) -> bool:
    """Return whether the session, or its application, has been stopped, or Spark's Java process has ended."""
    if is_connect(spark):
        return bool(spark.is_stopped)
    from py4j.protocol import Py4JNetworkError  # pyspark-client, which has Spark Connect alone, lacks it

    java = spark.sparkContext._jsc  # None after the session's own `stop`
    try:
        return java is None or bool(java.sc().isStopped())
    except (OSError, Py4JNetworkError):
        return True


def require_running(spark: SparkSession) -> None:
    """Raise `ConfigError` if the session, or its application, has been stopped."""
    if is_stopped(spark):
        raise ConfigError("spark", "the session has been stopped; start one, and make its DataFrames in it")


def unless_stopped(spark: SparkSession, action: Callable[[], object]) -> Callable[[], None]:
    """Return a function that does `action`, or nothing if the session has been stopped, and its jobs with it."""

    def act() -> None:
        if not is_stopped(spark):
            action()

    return act


def is_local(master: str) -> bool:
    """Return whether the driver runs the tasks itself."""
    return _LOCAL.fullmatch(master) is not None
