"""The application of a classic session, whose driver is this process."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame, SparkSession

from farandole.spark.jobs.application import DriverHost, is_local, is_stopped, unless_stopped
from farandole.spark.jobs.plan import TaskOrders, TaskPlan

APART = 256 << 10  # bytes of a plan, from which on it is sent apart from the secret
_ANY = ("0.0.0.0", "::")  # all addresses of the host


class ClassicApplication:
    """`Application` of a session whose SparkContext is in this process."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark, self._context = spark, spark.sparkContext

    @property
    def master(self) -> str:
        master = self._context.master
        assert master is not None  # Spark starts with none
        return master

    @property
    def settings(self) -> Mapping[str, str]:
        return dict(self._context.getConf().getAll())

    @property
    def python(self) -> str:
        return self._context.pythonExec

    @property
    def shares_terminal(self) -> bool:
        return is_local(self.master)

    def parallelism(self) -> int:
        return self._context.defaultParallelism

    def slots(self, task_cpus: int, profile: ResourceProfile | None) -> int:
        # The number that Spark itself checks for a barrier stage, GPUs and other resources included; PySpark has no
        # wrapper for it.
        context = self._context._jsc.sc()
        manager = context.resourceProfileManager()
        if profile is None:
            return int(context.maxNumConcurrentTasks(manager.defaultResourceProfile()))
        asked: Any = self._spark.range(1)
        java = asked._build_java_profile(profile)  # a new object for each call if the profile is older than the session
        # Counting needs a registered profile. Register it once, because Spark logs each registration as an event.
        known = manager.getEquivalentProfile(java)
        if known.isDefined():
            return int(context.maxNumConcurrentTasks(known.get()))
        manager.addResourceProfile(java)
        return int(context.maxNumConcurrentTasks(java))

    def driver_host(self, interface: str, patience: timedelta) -> DriverHost:
        # Spark's own driver listens there, so executors reach the address.
        conf = self._context.getConf()
        name = conf.get("spark.driver.host")
        assert name is not None  # Spark sets it
        bind = conf.get("spark.driver.bindAddress", name)
        if is_local(self.master) and bind not in _ANY:
            name = bind  # tasks run on this host, and `name` may stand for another of its addresses
        return DriverHost(bind=bind, name=name, setting="spark.driver.bindAddress")

    def attempt_of(self, stage: int) -> int:
        info = self._context.statusTracker().getStageInfo(stage)
        return 0 if info is None else info.currentAttemptId + 1

    def has_failed(self, stage: int, attempt: int) -> bool:
        info = self._context.statusTracker().getStageInfo(stage)
        return info is not None and (info.numFailedTasks > 0 or info.currentAttemptId + 1 > attempt)

    @contextmanager
    def job_group(self, group: str, description: str) -> Iterator[Callable[[], None]]:
        context = self._context
        names = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
        before = [(name, context.getLocalProperty(name)) for name in names]
        # A user's own group stays, as it is how notebooks and services cancel the jobs of a cell or a request.
        context.setJobGroup(before[0][1] or group, description, interruptOnCancel=True)
        context.addJobTag(group)
        try:
            yield unless_stopped(self._spark, lambda: context.cancelJobsWithTag(group))
        finally:
            if not is_stopped(self._spark):
                context.removeJobTag(group)
                for name, value in before:
                    context.setLocalProperty(name, value)  # type: ignore[arg-type]

    @contextmanager
    def handed_over(self, plan: TaskPlan, secret: bytes) -> Iterator[TaskOrders]:
        # Spark writes a function that is larger than its spark.broadcast.UDFCompressionThreshold (1 MiB) to files of
        # the driver and of each executor, where the secret must not be.
        if plan.size < APART:
            yield TaskOrders(secret=secret, plan=plan)
            return
        broadcast = self._context.broadcast(plan)
        try:
            yield TaskOrders(secret=secret, plan=broadcast)
        finally:
            broadcast.destroy()

    def repartitioned_to(self, dataframe: DataFrame) -> int | None:
        last = dataframe._jdf.queryExecution().analyzed()
        if last.getClass().getSimpleName() not in ("Repartition", "RepartitionByExpression"):
            return None
        return int(last.numPartitions())
