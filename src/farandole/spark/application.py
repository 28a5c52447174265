"""The seam between ranks and a session's Spark application, which a classic or a Spark Connect session belongs to."""

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame

if TYPE_CHECKING:
    from farandole.spark.task import TaskOrders, TaskPlan

__all__ = ["Application", "DriverHost", "is_connect", "is_local"]

_CONNECT = "pyspark.sql.connect."
_LOCAL = re.compile(r"local(\[.*\])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverHost:
    """The address at which this process listens for tasks, and the name by which they find it."""

    bind: str
    name: str
    setting: str  # the setting that is wrong if nothing can listen there


class Application(Protocol):
    """A Spark application as the code that starts ranks sees it."""

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

    def slots(self, task_cpus: int, profile: ResourceProfile | None) -> int:
        """Return how many ranks can run at once now, with `task_cpus` cores each and what `profile` asks for."""

    def driver_host(self, interface: str, patience: timedelta) -> DriverHost:
        """Return where to listen for tasks; may run a Spark job that tries it, for `patience` at most.

        Raises `ConfigError` when tasks reach no address of this machine, or no executor comes."""

    def attempt_of(self, stage: int) -> int:
        """Return the number of the stage's newest attempt, from 1; 0 for a stage that is not known."""

    def has_failed(self, stage: int, attempt: int) -> bool:
        """Return whether Spark is known to have noticed that a task of the attempt has failed."""

    def job_group(self, group: str, description: str) -> AbstractContextManager[Callable[[], None]]:
        """Name the Spark jobs of this thread while the block runs; gives the function that cancels them."""

    def handed_over(self, plan: "TaskPlan", secret: bytes) -> "AbstractContextManager[TaskOrders]":
        """Prepare a plan for the tasks while the block runs."""

    def repartitioned_to(self, dataframe: DataFrame) -> int | None:
        """Return the number of partitions if the last step of `dataframe` was to repartition it, else None."""


def is_connect(spark: Any) -> bool:
    """Return whether `spark` is a Spark Connect session."""
    return type(spark).__module__.startswith(_CONNECT)


def is_local(master: str) -> bool:
    """Return whether the driver runs the tasks itself."""
    return _LOCAL.fullmatch(master) is not None
