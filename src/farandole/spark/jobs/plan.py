"""Plan of a job of ranks, and the orders that carry it to the job's tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # pyspark-client, which has Spark Connect alone, lacks it
    from pyspark import Broadcast


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """Description of a job for its tasks, without the job's secret, as Spark may write a large plan to a disk."""

    job: str
    num_proc: int
    ranks_per_task: int
    call: bytes = field(repr=False)  # the pickled (function, args, kwargs)
    env: Mapping[str, str]  # of the ranks; overrides the executor's variables
    threads_set: bool  # the user has chosen OMP_NUM_THREADS
    driver_log: str  # host:port
    stream: bool  # show every line on the driver
    echo: bool  # show every line in the executor's log
    keep_all: bool  # return every rank's value, not rank 0's alone
    schemas: Sequence[bytes]  # of the DataFrames, serialized by Arrow; the tasks' input has the places of their rows
    executable: str
    start_timeout: timedelta

    @property
    def size(self) -> int:
        """The bytes of the fields that may be large."""
        return len(self.call) + sum(map(len, self.schemas))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrders:
    """A job's secret, and its plan or a broadcast of it; small enough that Spark keeps it in memory."""

    secret: bytes = field(repr=False)
    plan: "TaskPlan | Broadcast[TaskPlan]"
