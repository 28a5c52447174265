"""Spark jobs of ranks: the tasks of a barrier stage, which Spark's UI shows, run the ranks in order."""

import functools
import logging
import os
import pickle
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal, TypeVar

import pyspark
from pyspark import InheritableThread
from pyspark.errors import PySparkException
from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame, Row, SparkSession

from farandole.config import Config
from farandole.errors import ConfigError, SourceError
from farandole.launch.channel import MOST_FILES
from farandole.launch.environment import checked_variables
from farandole.launch.events import result_of
from farandole.launch.failures import Failure
from farandole.launch.pickling import dump_call
from farandole.meeting.handshake import new_secret
from farandole.spark.driver.log import DriverLog, OnMessage, Show, Verbosity, show_on_console
from farandole.spark.driver.peers import Job
from farandole.spark.jobs.application import Application, DriverHost, is_stopped, require_running
from farandole.spark.jobs.attempts import Attempts
from farandole.spark.jobs.chosen import application_of
from farandole.spark.jobs.failure import JobCancelled, blame, cancellation, dealing_error
from farandole.spark.jobs.interpreter import interpreter_error, use_own_interpreter
from farandole.spark.jobs.plan import TaskOrders, TaskPlan
from farandole.spark.jobs.slots import require_slots
from farandole.spark.jobs.task import RESULT_SCHEMA, run_task
from farandole.spark.rows.dataframes import arrow_schema, feeding, take_dataframes
from farandole.spark.rows.exchange.access import KeeperPlan, RowsLost
from farandole.spark.rows.exchange.batches import counted_by_rows
from farandole.spark.rows.exchange.shuffle import dealt
from farandole.topology import OF_ONE_PROCESS

log = logging.getLogger(__name__)

T = TypeVar("T")

LARGE_CALL = 10 << 20  # bytes
SETTLE = timedelta(seconds=1)  # for the failed rank's own report, after Spark has reported the failure
NOTICED = timedelta(seconds=3)  # for Spark to notice a failure that the rank has reported
LEAVE = timedelta(seconds=5)  # for the ranks to end after the job

# Variables that launchers set for one process. The driver may itself be a rank; its own ranks must not inherit these.
_OF_ONE_PROCESS = {
    *OF_ONE_PROCESS,
    *(f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")),
    "HOROVOD_HOSTNAME",
    *("FARANDOLE_WORKER_FD", "FARANDOLE_OUTER_LAUNCHES"),
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
    start_timeout: timedelta | float | None = None,
    max_attempts: int = 1,
    on_pickled: Callable[[bytes], None] | None = None,
    profile: ResourceProfile | None = None,
    ranks_per_task: int = 1,
) -> list[T]:
    """Run `main(*args, **kwargs)` on `num_proc` ranks at once and return their values in rank order.

    Blocks until all ranks have ended. With `dataframe` each rank has its rows in the file `shard()`; in place of
    DataFrame arguments `main` receives its rows of each. `results="first"` returns rank 0's value, and None for other
    ranks. With `max_attempts` above 1 Spark runs all ranks again when one has failed; see `Attempts`. Rows are dealt
    again if a keeper of them has ended and either no rank has begun or ranks may run again. `profile` sets the
    resources of each task, which runs `ranks_per_task` ranks. Raises `PicklingError`, `SlotsError` or `ConfigError`
    before ranks start; later the `RankFailed` of the first failure, `SourceError` with the host whose rows are lost,
    `CacheError` with the disk that is full, or `JobCancelled`."""
    variables, settings = _prepare(spark, num_proc, ranks_per_task, env or {}, start_timeout)
    call, fed = _dump(main, args, kwargs or {}, on_pickled)
    patience, interface = settings.start_timeout, settings.interface or ""
    application = application_of(spark)
    tasks = _Tasks(fed if dataframe is None else [dataframe], interface, profile)
    for each in tasks.dataframes:
        require_running(each.sparkSession)  # it may be another session than this one
    attempts = Attempts(max_attempts, int(application.settings.get("spark.stage.maxConsecutiveAttempts", "4")))

    draft = TaskPlan(
        job="",
        num_proc=num_proc,
        ranks_per_task=ranks_per_task,
        call=call,
        env={**variables, "FARANDOLE_START_TIMEOUT": f"{patience.total_seconds()}s"},
        threads_set="spark.executorEnv.OMP_NUM_THREADS" in application.settings,
        driver_log="",
        stream=verbosity == "all",
        echo=not (verbosity == "all" and application.shares_terminal),  # each line once
        keep_all=results == "all",
        schemas=[],
        executable=executable,
        start_timeout=patience,
    )
    listen = functools.partial(_listen, num_proc, show, attempts.watching(on_message))
    job = functools.partial(_run_job, spark, application, draft, tasks, attempts, listen, description)
    return _values(attempts.run(job), num_proc)


def _run_job(
    spark: SparkSession,
    application: Application,
    draft: TaskPlan,
    tasks: "_Tasks",
    attempts: Attempts,
    listen: Callable[[DriverHost, bytes, Job], DriverLog],
    description: str,
) -> list[Row]:
    """Run one Spark job with the plan `draft`, completed, and wait until the driver has all messages of its tasks."""
    host, each = _driver_host(spark, application, tasks.interface, draft.start_timeout), draft.ranks_per_task
    require_slots(spark, draft.num_proc, patience=draft.start_timeout, profile=tasks.profile, ranks_per_task=each)
    secret, name = new_secret(), secrets.token_hex(4)
    with (
        application.job_group(f"farandole-{name}", description) as cancel,
        counted_by_rows(tasks.dataframes) as restore_limit,
        listen(host, secret, _Job(application, attempts, cancel, restore_limit)) as driver_log,
    ):
        schemas = [arrow_schema(frame).serialize().to_pybytes() for frame in tasks.dataframes]
        plan = replace(draft, job=name, driver_log=driver_log.address(host.name), schemas=schemas)
        with application.handed_over(plan, secret) as orders:
            stage = _stage(spark, application, tasks, orders, plan)
            if attempts.most > 1:
                stage = stage.repartition(1)  # Spark repeats only a stage whose output another stage reads
            rows = _collect(stage, driver_log, attempts, cancel, each)
        driver_log.drain(LEAVE)
        return rows


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the driver's `environment` that ranks inherit: all settings of farandole and Horovod."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(("FARANDOLE_", "HOROVOD_")) and name not in _OF_ONE_PROCESS
    }


def _prepare(
    spark: SparkSession,
    num_proc: int,
    ranks_per_task: int,
    env: Mapping[str, str],
    start_timeout: timedelta | float | None,
) -> tuple[dict[str, str], Config]:
    """Return the ranks' variables and the settings in them; raises `ConfigError` here rather than on every rank.

    Also chooses the Python of tasks on a local master."""
    if num_proc < 1:
        raise ConfigError("num_proc", f"must be >= 1, got {num_proc}")
    if ranks_per_task < 1 or num_proc % ranks_per_task:
        raise ConfigError("ranks_per_task", f"must divide the number of ranks, {num_proc}, got {ranks_per_task}")
    use_own_interpreter(spark)
    variables = {**passed_on(os.environ), **checked_variables(env)}
    given = {} if start_timeout is None else {"start_timeout": start_timeout}
    return variables, Config.from_environment(variables, **given)


def _dump(
    main: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    on_pickled: Callable[[bytes], None] | None,
) -> tuple[bytes, list[DataFrame]]:
    """Pickle the call without its DataFrames; return it and them.

    They are those among the arguments, and those of converters anywhere in the call."""
    args, kwargs, fed = take_dataframes(args, kwargs)
    with feeding(fed):
        call = dump_call(main, args, kwargs)
    if len(fed) > MOST_FILES:
        raise ConfigError("dataframe", f"{len(fed)} are in the call, {MOST_FILES} are the most that a job has")
    if len(call) > LARGE_CALL:
        log.warning(
            "the pickled function and its arguments are %d MB, which every rank has to be sent; "
            "load large objects inside the function, from a path",
            len(call) >> 20,
        )
    if on_pickled is not None:
        on_pickled(call)
    return call, fed


def _driver_host(spark: SparkSession, application: Application, interface: str, patience: timedelta) -> DriverHost:
    try:
        return application.driver_host(interface, patience)
    except PySparkException as error:
        lacking = interpreter_error(spark, str(error))
        if lacking is None:
            raise
        raise lacking from None


def _listen(
    num_proc: int, show: Show, on_message: OnMessage | None, host: DriverHost, secret: bytes, job: Job
) -> DriverLog:
    try:
        return DriverLog(secret, num_proc, host=host.bind, show=show, on_message=on_message, job=job)
    except OSError as error:
        raise ConfigError(host.setting, f"the driver cannot listen on {host.bind} ({error})") from error


class _Job(Job):
    """The Spark job, which is cancelled when rows are lost before ranks begin, or when its stage must not be repeated.

    `restore_limit` restores Spark's limit of Arrow batches; keepers connect after the query is planned."""

    def __init__(
        self,
        application: Application,
        attempts: Attempts,
        cancel: Callable[[], None],
        restore_limit: Callable[[], None],
    ) -> None:
        self._application, self._attempts = application, attempts
        self._cancel, self._restore_limit = cancel, restore_limit
        self.repeats = attempts.most > 1

    def attempt_of(self, stage: int) -> int:
        return self._application.attempt_of(stage)

    def on_attempt(self, number: int, failed: Failure | None) -> None:
        if self.repeats and not self._attempts.begin(number, failed):
            self._cancel()

    def on_failure(self, stage: int, number: int, failure: Failure, culprit: Callable[[], Failure | None]) -> None:
        if not self.repeats or failure.consequence or self._attempts.go_on(failure):
            return
        # Spark shows the task as failed, with its exception, only if the failure reaches it before the cancellation.
        give_up = time.monotonic() + NOTICED.total_seconds()
        while time.monotonic() < give_up and not self._application.has_failed(stage, number):
            time.sleep(0.02)
        # Meanwhile another rank may be known to be killed; a framework reports its loss by an error of its own.
        if not self._attempts.go_on(culprit() or failure):
            self._cancel()

    def on_keeper(self) -> None:
        self._restore_limit()

    def on_lost_keeper(self, *, begun: bool) -> None:
        # Cancel at once: Spark reads a task's error only between two batches of its rows, perhaps minutes later.
        if not begun:
            self._cancel()


@dataclass(frozen=True, slots=True)
class _Tasks:
    """DataFrames that the tasks of a job feed to its ranks, and the tasks' interface and resources."""

    dataframes: Sequence[DataFrame]
    interface: str
    profile: ResourceProfile | None


def _stage(
    spark: SparkSession, application: Application, tasks: _Tasks, orders: TaskOrders, plan: TaskPlan
) -> DataFrame:
    """Return the barrier stage; a task reads the places of its ranks' rows, or without DataFrames a row of its own."""
    keeper = KeeperPlan(secret=orders.secret, driver=plan.driver_log, interface=tasks.interface)
    number, each = plan.num_proc // plan.ranks_per_task, plan.ranks_per_task
    if tasks.dataframes:
        source = dealt(
            tasks.dataframes, plan.num_proc, keeper,
            repartitioned_to=application.repartitioned_to, ranks_per_task=each,
        )  # fmt: skip
    else:
        source = spark.range(0, number, 1, number)
    task = functools.partial(run_task, orders)
    # PySpark 3.5 knows no such argument.
    profile = {} if tasks.profile is None else {"profile": tasks.profile}
    return source.mapInArrow(task, RESULT_SCHEMA, barrier=True, **profile)


def _collect(
    stage: DataFrame, driver_log: DriverLog, attempts: Attempts, cancel: Callable[[], None], ranks_per_task: int
) -> list[Row]:
    rows: Future[list[Row]] = Future()

    def collect() -> None:
        try:
            rows.set_result(stage.collect())
        except BaseException as error:
            rows.set_exception(error)

    # On a separate thread, which inherits the job group. Within a call of py4j, Ctrl-C would print pages of traces,
    # because PySpark's signal handler makes another call on the connection that waits.
    session = {} if pyspark.__version__.startswith("3.") else {"session": stage.sparkSession}
    thread = InheritableThread(target=collect, name="farandole-collect", daemon=True, **session)
    thread.start()
    try:
        return result_of(rows)
    except BaseException as error:
        # Also for Ctrl-C. The driver log ends ranks within a second; Spark's kill takes two or three.
        driver_log.cancel(f"the job has ended: {type(error).__name__}")
        cancel()
        thread.join(LEAVE.total_seconds())
        if not isinstance(error, Exception):
            driver_log.drain(LEAVE)
            raise
        driver_log.wait_for_failure(SETTLE)
        driver_log.drain(LEAVE)
        lacking = None if driver_log.failures.newest else interpreter_error(stage.sparkSession, str(error))
        if lacking is not None:
            raise lacking from None
        failure = attempts.refused or blame(driver_log.failures.newest, str(error), ranks_per_task)
        _raise_for_lost_rows(driver_log, failure, repeats=attempts.most > 1)
        if failure is None:
            dealing = dealing_error(str(error)) if driver_log.keepers.feeding else None
            known = dealing or cancellation(str(error))
            if known is None and is_stopped(stage.sparkSession):
                known = JobCancelled("its Spark session was stopped")
            if known is None:
                raise
            raise known from None
        # Not from Spark's exception, which is two hundred lines of Java around the same text. It remains available
        # as __context__.
        raise failure.error(attempts.earlier) from failure.cause


def _raise_for_lost_rows(driver_log: DriverLog, failure: Failure | None, *, repeats: bool) -> None:
    """Raise `SourceError` if the job failed because a keeper has ended: `RowsLost` if the job may run again."""
    hosts = ", ".join(sorted(set(driver_log.keepers.lost)))
    beginning = driver_log.keepers.feeding
    # `failure` may be that of a killed rank, although the repeated stage failed because its rows were lost.
    missed = any(isinstance(each.cause, RowsLost) for each in driver_log.failures.newest)
    if not hosts or not (missed or (failure is None and beginning)):
        return
    kind = RowsLost if beginning or repeats else SourceError
    problem = (
        "are gone: the process that kept them has ended, killed by the system's out-of-memory killer perhaps, or with "
        "its host; give executors more memory (spark.executor.memoryOverhead) and run the job again"
    )
    raise kind(f"the rows kept on {hosts}", problem) from (failure.cause if failure else None)


def _values(rows: Sequence[Row], num_proc: int) -> list[T]:
    parts: dict[int, dict[int, bytes]] = {}
    for row in rows:
        parts.setdefault(row["rank"], {})[row["part"]] = bytes(row["chunk"])
    if not parts:
        raise ConfigError("dataframe", "has no rows, so Spark started no task")
    assert sorted(parts) == list(range(num_proc)), sorted(parts)
    return [pickle.loads(b"".join(chunk for _, chunk in sorted(parts[rank].items()))) for rank in range(num_proc)]
