"""A function on every slot of a Spark barrier stage: rank k is task k, and what happens to it shows in Spark's UI."""

import functools
import logging
import os
import pickle
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, TypeVar

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from farandole.config import Config
from farandole.errors import ConfigError
from farandole.handshake import new_secret
from farandole.launch.pickling import dump_call
from farandole.spark.child import shard
from farandole.spark.driver_log import DriverLog, OnMessage, Show, Verbosity, show_on_console
from farandole.spark.failure import blame
from farandole.spark.slots import is_local, master_of, require_slots
from farandole.spark.task import RESULT_SCHEMA, TaskPlan, run_task

__all__ = ["passed_on", "run_barrier_job", "shard"]

log = logging.getLogger(__name__)

T = TypeVar("T")

LARGE_CALL = 10 << 20  # bytes
SETTLE = timedelta(seconds=1)  # for the guilty rank's report, when Spark's news of the failure came first
LEAVE = timedelta(seconds=5)  # for the ranks to end when the job has

# Set by launchers for one process each; those of the driver, itself a rank perhaps, are not for the ranks it starts.
_PLACES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
_OF_ONE_PROCESS = {f"{prefix}_{name}" for prefix in ("FARANDOLE", "HOROVOD") for name in _PLACES} | {
    f"FARANDOLE_{name}" for name in ("RENDEZVOUS", "SECRET", "GENERATION", "JOB", "WORKER_FD")
}


def run_barrier_job(
    spark: SparkSession,
    main: Callable[..., T],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    num_proc: int,
    dataframe: DataFrame | None = None,
    description: str,
    verbosity: Verbosity = "log_callback_only",
    env: Mapping[str, str] | None = None,
    on_message: OnMessage | None = None,
    results: Literal["all", "first"] = "all",
    show: Show = show_on_console,
    executable: str = "",
    start_timeout: timedelta | None = None,
) -> list[T]:
    """Run `main(*args, **kwargs)` on `num_proc` ranks at once and return their values in rank order.

    Blocks until all ranks have ended. With `dataframe` each rank finds its rows, a partition of num_proc, in the
    file `shard()`. `results="first"` brings rank 0's value alone, so that the others need not be picklable.
    Raises `PicklingError`, `SlotsError` and `ConfigError` before anything runs, and the `RankFailed` of the rank that
    failed first, from its own exception; then nothing of the job is left running."""
    if num_proc < 1:
        raise ConfigError("num_proc", f"must be >= 1, got {num_proc}")
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise ConfigError("spark", "is a Spark Connect session, which cannot start ranks; use a classic session")
    call = dump_call(main, args, kwargs or {})
    if len(call) > LARGE_CALL:
        log.warning(
            "the pickled function and its arguments are %d MB, which every rank has to be sent; "
            "load large objects inside the function, from a path",
            len(call) >> 20,
        )
    variables = {**passed_on(os.environ), **(env or {})}
    settings = Config.from_environment(variables)  # a wrong one is refused here rather than on every rank
    patience = settings.start_timeout if start_timeout is None else start_timeout
    require_slots(spark, num_proc, patience=patience)
    conf = spark.sparkContext.getConf()
    secret = new_secret()
    driver_host = conf.get("spark.driver.host")
    assert driver_host is not None  # Spark sets it
    with _listen(conf.get("spark.driver.bindAddress", driver_host), secret, num_proc, show, on_message) as driver_log:
        plan = TaskPlan(
            job=secrets.token_hex(4),
            num_proc=num_proc,
            secret=secret,
            call=call,
            env={**variables, "FARANDOLE_START_TIMEOUT": f"{patience.total_seconds()}s"},
            threads_set=conf.contains("spark.executorEnv.OMP_NUM_THREADS"),
            driver_log=driver_log.address(driver_host),
            stream=verbosity == "all",
            # Where the driver runs the tasks, their log is its own terminal: once is enough.
            echo=not (verbosity == "all" and is_local(master_of(spark))),
            keep_all=results == "all",
            schema=None if dataframe is None else _arrow_schema(dataframe),
            executable=executable,
            start_timeout=patience,
        )
        source = spark.range(0, num_proc, 1, num_proc) if dataframe is None else _parted(dataframe, num_proc)
        stage = source.mapInArrow(functools.partial(run_task, plan), RESULT_SCHEMA, barrier=True)
        rows = _collect(spark, stage, driver_log, f"farandole-{plan.job}", description)
        driver_log.drain(LEAVE)
    return _values(rows, num_proc)


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the driver that its ranks get: all settings of farandole's and Horovod's."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(("FARANDOLE_", "HOROVOD_")) and name not in _OF_ONE_PROCESS
    }


def _listen(host: str, secret: bytes, num_proc: int, show: Show, on_message: OnMessage | None) -> DriverLog:
    try:
        return DriverLog(secret, num_proc, host=host, show=show, on_message=on_message)
    except OSError as error:
        raise ConfigError("spark.driver.bindAddress", f"the driver cannot listen on {host} ({error})") from error


def _arrow_schema(dataframe: DataFrame) -> bytes:
    schema: bytes = to_arrow_schema(dataframe.schema).serialize().to_pybytes()
    return schema


def _parted(dataframe: DataFrame, num_proc: int) -> DataFrame:
    """`dataframe` in exactly `num_proc` partitions; as it is when its last step was to repartition it so.

    Counting partitions would run the query's shuffles, and more partitions than slots wait for ten minutes."""
    last = dataframe._jdf.queryExecution().optimizedPlan()
    if (
        last.getClass().getSimpleName() in ("Repartition", "RepartitionByExpression")
        and last.numPartitions() == num_proc
    ):
        return dataframe
    return dataframe.repartition(num_proc)


def _collect(spark: SparkSession, stage: DataFrame, driver_log: DriverLog, group: str, description: str) -> list[Row]:
    with _job_group(spark, group, description):
        try:
            return stage.collect()
        except BaseException as error:
            # Ctrl-C among others. Ranks end within a second, where Spark's kill takes two or three.
            driver_log.cancel(f"the job has ended: {type(error).__name__}")
            spark.sparkContext.cancelJobGroup(group)
            if not isinstance(error, Exception):
                driver_log.drain(LEAVE)
                raise
            driver_log.wait_for_failure(SETTLE)
            driver_log.drain(LEAVE)
            failure = blame(driver_log.failures, str(error))
            if failure is None:
                raise
            # Not from Spark's exception: that is two hundred lines of Java around the same text. It stays reachable
            # as __context__.
            raise failure.error() from failure.cause


@contextmanager
def _job_group(spark: SparkSession, group: str, description: str) -> Iterator[None]:
    """Name the jobs of this thread, so that they can be cancelled together, and restore the thread's own names."""
    context = spark.sparkContext
    names = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
    before = [(name, context.getLocalProperty(name)) for name in names]
    context.setJobGroup(group, description, interruptOnCancel=True)
    try:
        yield
    finally:
        for name, value in before:
            context.setLocalProperty(name, value)  # type: ignore[arg-type]


def _values(rows: Sequence[Row], num_proc: int) -> list[T]:
    parts: dict[int, dict[int, bytes]] = {}
    for row in rows:
        parts.setdefault(row["rank"], {})[row["part"]] = bytes(row["chunk"])
    if not parts:
        raise ConfigError("dataframe", "has no rows: Spark knew so beforehand and started no task")
    assert sorted(parts) == list(range(num_proc)), sorted(parts)
    return [pickle.loads(b"".join(chunk for _, chunk in sorted(parts[rank].items()))) for rank in range(num_proc)]
