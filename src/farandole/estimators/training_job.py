"""Job in which an estimator's ranks train: a Spark job, or processes of this machine without Spark."""

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TypeAlias, TypeVar

from pyspark.sql import DataFrame, SparkSession

from farandole.core.public import init, shutdown, size
from farandole.errors import ConfigError, DataError, RankFailed, SourceError
from farandole.estimators.backend import Backend
from farandole.estimators.local_job import run_local_ranks
from farandole.spark.driver.display import Display
from farandole.spark.driver.log import OnMessage, show_on_console
from farandole.spark.jobs.barrier import run_barrier_job
from farandole.spark.jobs.task_settings import TaskSettings

T = TypeVar("T")
OnEpoch: TypeAlias = Callable[[dict[str, float]], object]


def run_training_job(
    spark: SparkSession | None,
    task: Callable[[], T | None],
    *,
    dataframe: DataFrame | None,
    name: str,
    num_proc: int,
    verbose: int,
    env: Mapping[str, str],
    max_attempts: int,
    tasks: TaskSettings,
    shows_epochs: bool = True,
    on_epoch: OnEpoch | None = None,
) -> T:
    """Run `task` on each of `num_proc` ranks, which are fed the rows of `dataframe`; return rank 0's value.

    If `spark` is None, the ranks are processes of this machine and read their rows themselves.

    Blocks until all ranks have ended. `name` is shown in Spark's UI and above the progress. Without `shows_epochs`
    messages about finished epochs are not shown; they still count as progress. `on_epoch` receives the values of an
    epoch on another thread; messages of a busy rank may be dropped. `tasks.shows_lines` decides whether the ranks'
    output is shown; if it is None, the output is shown if `verbose` is above 1. Raises a rank's `DataError`,
    `SourceError` or `ConfigError` as it is, `RankFailed` for other failures."""
    display = Display(name) if verbose else None
    try:
        with display or nullcontext():
            on_message = _handler(display, shows_epochs, on_epoch)
            shows_lines = verbose > 1 if tasks.shows_lines is None else tasks.shows_lines
            shown = tasks.show or show_on_console
            if spark is None:
                value = run_local_ranks(
                    task, num_proc=num_proc, env=env, max_attempts=max_attempts, on_message=on_message, show=shown,
                    shows_lines=shows_lines, executable=tasks.executable, start_timeout=tasks.start_timeout,
                )  # fmt: skip
                return _value(value)
            values = run_barrier_job(
                spark,
                task,
                num_proc=num_proc,
                dataframe=dataframe,
                description=f"{name}: {num_proc} ranks",
                verbosity="all" if shows_lines else "log_callback_only",
                show=shown,
                env=env,
                on_message=on_message,
                results="first",
                max_attempts=max_attempts,
                executable=tasks.executable,
                start_timeout=tasks.start_timeout,
                profile=tasks.profile,
                ranks_per_task=tasks.ranks_per_task,
            )
            return _value(values[0])
    except RankFailed as failure:
        # The caller can correct rows and settings, so their error matters, not the rank that found them.
        if isinstance(failure.__cause__, (DataError, SourceError, ConfigError)):
            raise failure.__cause__ from None
        raise


def run_on_backend(backend: Backend, task: Callable[[], bytes | None], env: Mapping[str, str]) -> bytes:
    """Run `task` on the ranks of a user's backend; return rank 0's value.

    Blocks until `backend.run` returns, and raises its errors. Raises `ConfigError` if the processes are not the ranks
    of one job, or if `run` does not return their values."""
    ranks = backend.num_processes()
    values = backend.run(functools.partial(_as_rank, task, ranks), args=(), env=env)
    if not isinstance(values, (list, tuple)) or len(values) != ranks or not isinstance(values[0], bytes):
        raise ConfigError("backend", f"{type(backend).__name__}.run must return the function's {ranks} values by rank")
    return values[0]


def _as_rank(task: Callable[[], T], ranks: int) -> T:
    init()
    if size() != ranks:
        joined = f"its processes are ranks of a job of {size()}, and num_processes() is {ranks}"
        shutdown()
        raise ConfigError("backend", f"{joined}; start them as one job, with farandole.run for example")
    return task()


def _value(value: T | None) -> T:
    assert value is not None, "rank 0 returns a value"
    return value


def _handler(display: Display | None, shows_epochs: bool, on_epoch: OnEpoch | None) -> OnMessage:
    def handle(rank: int, message: dict[str, object]) -> None:
        is_epoch = message["kind"] == "epoch"
        if display is not None and (shows_epochs or not is_epoch):
            display.show(rank, message)
        if is_epoch and on_epoch is not None:
            on_epoch({name: value for name, value in message.items() if isinstance(value, (int, float))})

    return handle
