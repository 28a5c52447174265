"""Number of ranks that a Spark application can run at once, known before a stage starts.

Spark itself waits ten minutes in silence before it refuses a barrier stage that cannot fit: 40 checks, 15 s apart
(spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures and .interval, which Spark reads only when the application
starts).
"""

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from farandole.errors import ConfigError, SlotsError, SlotsTimeout
from farandole.spark.jobs.application import Application, is_local
from farandole.spark.jobs.chosen import application_of
from farandole.spark.jobs.gpus import divide

log = logging.getLogger(__name__)

POLL = 0.1  # seconds
SETTLED = timedelta(seconds=1.5)  # executors of one application register within this time of each other

# `ConnectApplication.slots` has the reasons.
_UNCOUNTED = (
    "a Spark Connect server does not tell the number of slots where spark.default.parallelism or "
    "spark.sql.leafNodeDefaultParallelism is set, or where tasks need GPUs"
)
_RESOURCE = re.compile(r"spark\.task\.resource\.(.+)\.amount")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The slots that the configuration of a Spark application promises, and the resources of its tasks."""

    master: str
    instances: int | None = None  # executors, if their number is fixed
    tasks: int | None = None  # of each executor at once, if its cores are fixed
    task_cpus: int = 1
    dynamic: bool = False
    resource: str = ""  # a setting that makes every task require a GPU or a similar resource
    gpus: str = ""  # of each task; may be a fraction
    ranks_per_task: int = 1

    @classmethod
    def read(cls, master: str, conf: Mapping[str, str], ranks_per_task: int = 1) -> "Cluster":
        """Read the fields from Spark's configuration `conf`."""
        instances, cores = _number(conf, "spark.executor.instances"), _number(conf, "spark.executor.cores")
        # The default is one core, except on a standalone cluster, where an executor takes all cores of its machine.
        if cores is None and not master.startswith("spark://"):
            cores = 1
        task_cpus = _number(conf, "spark.task.cpus") or 1
        local_cluster = _LOCAL_CLUSTER.fullmatch(master)
        if local_cluster:
            instances, cores = int(local_cluster[1]), int(local_cluster[2])
        return cls(
            master=master,
            ranks_per_task=ranks_per_task,
            instances=instances,
            tasks=None if cores is None else min([cores // task_cpus, *_tasks_by_resource(conf)]),
            task_cpus=task_cpus,
            gpus=conf.get("spark.task.resource.gpu.amount", ""),
            resource=next((name for name in conf if name.startswith("spark.task.resource.")), ""),
            # Spark, too, ignores the setting if the driver is the only executor.
            dynamic=conf.get("spark.dynamicAllocation.enabled", "").lower() == "true" and not is_local(master),
        )

    @property
    def promised(self) -> int | None:
        """The slots, once all executors have registered; None if the configuration does not fix their number."""
        if self.instances is None or self.tasks is None:
            return None
        return self.instances * self.tasks * self.ranks_per_task


def _tasks_by_resource(conf: Mapping[str, str]) -> list[int]:
    """Return how many tasks each resource of an executor, such as its GPUs, suffices for."""
    found = []
    for name, amount in conf.items():
        resource = _RESOURCE.fullmatch(name)
        there = _number(conf, f"spark.executor.resource.{resource[1]}.amount") if resource else None
        if there is not None and float(amount):
            found.append(int(there // float(amount)))
    return found


def _number(conf: Mapping[str, str], name: str) -> int | None:
    text = conf.get(name, "")
    return int(text) if text.isdigit() else None


def decide(
    wanted: int, *, present: int, promised: int | None, unchanged: timedelta, waited: timedelta, patience: timedelta
) -> Literal["go", "wait", "refuse", "timeout"]:
    """Decide whether `wanted` ranks fit, if the number of `present` slots has not changed for the time `unchanged`."""
    if present >= wanted:
        return "go"
    if promised is not None and wanted > promised:
        return "refuse"
    # Without a promise, a number that has stopped growing counts as final; none at all means that none has started.
    if promised is None and present > 0 and unchanged >= SETTLED:
        return "refuse"
    return "timeout" if waited >= patience else "wait"


def require_slots(
    spark: SparkSession,
    wanted: int,
    *,
    patience: timedelta,
    profile: ResourceProfile | None = None,
    ranks_per_task: int = 1,
) -> None:
    """Return when `wanted` ranks can run at once; raises `SlotsError` if they cannot.

    Blocks while promised executors register, up to `patience`; then raises `SlotsTimeout`. Refuses within two seconds
    if the configuration promises too few slots, or if it promises none and the number of slots has stopped growing.
    Where the number of slots is not known, only the promise counts; without one a warning is logged. Raises
    `ConfigError` under dynamic allocation, which Spark does not combine with barrier stages, and if tasks need a
    resource that a local session does not give, a fraction of a GPU, or GPUs that their ranks cannot divide. `profile`
    replaces the resources of tasks in the configuration."""
    application = application_of(spark)
    cluster = cluster_of(application, profile, ranks_per_task)
    local = is_local(cluster.master)
    started = changed = time.monotonic()
    before = None
    while (present := _present(application, cluster, profile)) is not None:
        now = time.monotonic()
        if before not in (None, present):
            changed = now
            log.info("%d of %d slots are available", present, wanted)
        verdict = decide(
            wanted,
            present=present,
            promised=present if local else cluster.promised,
            unchanged=timedelta(seconds=now - changed),
            waited=timedelta(seconds=now - started),
            patience=patience,
        )
        if verdict == "go":
            return
        if verdict == "refuse":
            raise SlotsError(wanted, max(present, 0 if local else cluster.promised or 0), _where(cluster))
        if verdict == "timeout":
            raise _timeout(wanted, present, cluster, patience)
        before = present
        time.sleep(POLL)
    if local or cluster.promised is None:
        log.warning("if the %d ranks do not fit, Spark says so only after ten minutes, because %s", wanted, _UNCOUNTED)
    elif wanted > cluster.promised:
        raise SlotsError(wanted, cluster.promised, _where(cluster))


def all_slots(
    spark: SparkSession, *, patience: timedelta, profile: ResourceProfile | None = None, ranks_per_task: int = 1
) -> int:
    """Return the number of slots, once all executors that the configuration promises have registered.

    Blocks up to `patience`; without a promise until the number has not changed for the time `SETTLED`. Raises
    `SlotsTimeout` if there are none, or fewer than promised, and `ConfigError` if their number is not known."""
    application = application_of(spark)
    cluster = cluster_of(application, profile, ranks_per_task)
    local = is_local(cluster.master)
    if not local and cluster.promised is not None:
        require_slots(spark, cluster.promised, patience=patience, profile=profile, ranks_per_task=ranks_per_task)
        return cluster.promised
    started = changed = time.monotonic()
    before = None
    while (present := _present(application, cluster, profile)) is not None:
        now = time.monotonic()
        if present != before:
            before, changed = present, now
        if local or (present and now - changed >= SETTLED.total_seconds()):
            return present
        if now - started >= patience.total_seconds():
            raise _timeout(1, 0, cluster, patience)
        time.sleep(POLL)
    raise ConfigError("num_proc", f"must be given, because {_UNCOUNTED}")


def _present(application: Application, cluster: Cluster, profile: ResourceProfile | None) -> int | None:
    """Return how many ranks can run at once now; None if that is not known."""
    tasks = application.slots(cluster.task_cpus, profile)
    return None if tasks is None else tasks * cluster.ranks_per_task


def needed(settings: Mapping[str, str], profile: ResourceProfile | None) -> dict[str, str]:
    """Return the configuration, with the resources of tasks replaced by those of `profile`."""
    if profile is None:
        return dict(settings)
    kept = {name: value for name, value in settings.items() if not name.startswith("spark.task.resource.")}
    for name, request in profile.taskResources.items():
        setting = "spark.task.cpus" if name == "cpus" else f"spark.task.resource.{name}.amount"
        kept[setting] = f"{request.amount:g}"
    return kept


def cluster_of(application: Application, profile: ResourceProfile | None, ranks_per_task: int = 1) -> Cluster:
    """Return the application's promises for tasks of `profile`; raises `ConfigError` if no barrier stage can run."""
    cluster = Cluster.read(application.master, needed(application.settings, profile), ranks_per_task)
    if profile is not None and is_local(cluster.master):
        raise ConfigError(
            "resource_profile",
            f"is for clusters, where Spark places tasks by their needs; leave it out on {cluster.master}",
        )
    if profile is not None and profile.executorResources:
        raise ConfigError(
            "resource_profile",
            f"asks for executors with {', '.join(profile.executorResources)}, which Spark starts under dynamic "
            "allocation alone, and then it runs no barrier stage; keep the requests for tasks",
        )
    if cluster.dynamic:
        raise ConfigError(
            "spark.dynamicAllocation.enabled",
            "is true, but all ranks must run at once and Spark refuses a barrier stage then; "
            "start the Spark application with spark.dynamicAllocation.enabled=false and a fixed number of executors",
        )
    if cluster.resource and is_local(cluster.master):
        raise ConfigError(
            cluster.resource,
            f"is set, but {cluster.master} gives no such resource to tasks and Spark would wait for it for ever; "
            "leave it out, ranks of a local session see all GPUs",
        )
    gpus = float(cluster.gpus or 0)
    if not gpus.is_integer():
        raise ConfigError(
            "spark.task.resource.gpu.amount",
            f"is {cluster.gpus}, but a rank needs a GPU of its own at its local rank; ask for whole GPUs, or for none, "
            "by this setting or by a resource profile",
        )
    divide(["?"] * int(gpus), ranks_per_task)  # raises the error that each task would raise
    return cluster


def _timeout(wanted: int, present: int, cluster: Cluster, patience: timedelta) -> SlotsTimeout:
    return SlotsTimeout(wanted, present, f"{_where(cluster)} after {patience.total_seconds():g} s")


def _where(cluster: Cluster) -> str:
    needs = [f"{cluster.task_cpus} cores"] if cluster.task_cpus > 1 else []
    if cluster.gpus:
        needs.append(f"{cluster.gpus} GPU")
    whose = "rank" if cluster.ranks_per_task == 1 else f"task of {cluster.ranks_per_task} ranks"
    each = f" with {' and '.join(needs or ['1 core'])} per {whose}" if needs or cluster.ranks_per_task > 1 else ""
    return f"Spark ({cluster.master}{each})"
