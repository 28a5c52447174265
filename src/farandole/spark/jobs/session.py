"""`farandole.spark.run` on the active session, with the arguments of `horovod.spark.run`."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TextIO, TypeVar

from pyspark import TaskContext
from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from farandole.errors import ConfigError
from farandole.refusals import IGNORED_ARGUMENTS, REFUSED_SPARK_MPI
from farandole.spark.driver.log import Show, Verbosity, show_on_console
from farandole.spark.jobs.barrier import run_barrier_job
from farandole.spark.jobs.chosen import application_of
from farandole.topology import JobEnvironment

log = logging.getLogger(__name__)

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    resource_profile: ResourceProfile | None = None,
    ranks_per_task: int = 1,
) -> list[T]:
    """Call `fn(*args, **kwargs)` on `num_proc` ranks of the active Spark session; return the values in rank order.

    Blocks until all ranks have ended. `num_proc` defaults to Spark's default parallelism times `ranks_per_task`,
    `start_timeout` (seconds) to FARANDOLE_START_TIMEOUT. In place of a DataFrame argument `fn` receives the rank's
    share of its rows, of which `farandole.data.FeedLoader` makes batches. The ranks' output goes to `stdout` and
    `stderr`, by default the driver's own; with verbose=0 it goes only to the executors' logs. The task requests of
    `resource_profile` replace the resources of tasks in Spark's configuration. Each task runs `ranks_per_task` ranks,
    which divide its GPUs evenly. `use_gloo` has no effect but a warning. Raises `SlotsError` if the cluster has too few
    slots, `PicklingError` if the call cannot be pickled, and the `RankFailed` of the rank that failed first, with the
    rank's own exception as its cause."""
    check_transport(use_mpi or extra_mpi_args, use_gloo)
    spark = active_session()
    environment = dict(env or {})
    if nics is not None:
        environment["FARANDOLE_INTERFACE"] = interface_of(nics)
    verbosity: Verbosity = "all" if verbose else "log_callback_only"
    return run_barrier_job(
        spark,
        fn,
        args,
        kwargs,
        num_proc=application_of(spark).parallelism() * ranks_per_task if num_proc is None else num_proc,
        description=f"farandole.spark.run: {getattr(fn, '__name__', type(fn).__name__)}",
        verbosity=verbosity,
        env=environment,
        show=shown_on(stdout, stderr, prefix_output_with_timestamp),
        executable=executable or "",
        profile=resource_profile,
        ranks_per_task=ranks_per_task,
        start_timeout=start_timeout,
    )


def check_transport(use_mpi: object, use_gloo: object) -> None:
    """Refuse MPI with `ConfigError`; warn that `use_gloo` has no effect."""
    if use_mpi:
        raise ConfigError("use_mpi", REFUSED_SPARK_MPI)
    if use_gloo:
        log.warning("use_gloo has no effect: %s", IGNORED_ARGUMENTS["use_gloo"])


def active_session() -> SparkSession:
    """Return the active session; raises `ConfigError` if there is none."""
    spark = SparkSession.getActiveSession()
    if spark is None:
        _refuse_workers()
    if spark is None and _has_started():
        spark = SparkSession.builder.getOrCreate()
    if spark is None:
        raise ConfigError(
            "spark", "Could not find an active SparkContext, are you running in a PySpark session? Start one first"
        )
    return spark


def started_session() -> SparkSession:
    """Return the active session, or start one; raises `ConfigError` in a rank or a task, or if Java does not start."""
    spark = SparkSession.getActiveSession()
    if spark is not None:
        return spark
    _refuse_workers()
    try:
        return SparkSession.builder.getOrCreate()
    except RuntimeError as error:
        if "Java gateway process exited" not in str(error):
            raise
        raise ConfigError(
            "JAVA_HOME",
            f"is {os.environ.get('JAVA_HOME', 'not set')}, and Spark has started no Java from there or PATH; it needs "
            "Java 17 or newer. HorovodRunner(np=-2) runs two ranks on this machine, and estimators fit pandas "
            "DataFrames, without Java",
        ) from error


def _refuse_workers() -> None:
    """Raise `ConfigError` in a rank and in a Spark task: each would start an application of its own."""
    job, task = JobEnvironment.read(os.environ), TaskContext.get()
    here = None
    if job is not None:
        here = f"rank {job.rank} of {job.size}"
    elif task is not None:
        here = f"the task of partition {task.partitionId()} of a Spark job"
    if here is not None:
        raise ConfigError("spark", f"this process is {here}, which has no Spark session; call this on the driver")


def _has_started() -> bool:
    """Return whether this process has a session, perhaps in another thread."""
    if is_remote():
        return True  # the builder connects to the configured server
    from pyspark import SparkContext

    return SparkContext._active_spark_context is not None


def interface_of(nics: Iterable[str] | str) -> str:
    """Return FARANDOLE_INTERFACE for the interfaces `nics`; each host uses the first of them that connects."""
    return nics if isinstance(nics, str) else ",".join(nics)


def shown_on(stdout: TextIO | None, stderr: TextIO | None, timestamp: bool) -> Show:
    """Return a function that writes the ranks' lines to these files, or to the console for None.

    With `timestamp` it writes the current time before each line."""
    streams = {"stdout": stdout, "stderr": stderr}

    def show(stream: str, text: str) -> None:
        if timestamp:
            now = time.strftime("%a %b %d %H:%M:%S %Y")
            text = "".join(f"{now}{line}" for line in text.splitlines(keepends=True))
        target = streams[stream]
        if target is None:
            show_on_console(stream, text)
        else:
            target.write(text)
            target.flush()

    return show
