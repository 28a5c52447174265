"""`HorovodRunner`, which runs a function on all ranks of a Spark job, or on local processes for a test."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from operator import index
from typing import SupportsIndex, TypeVar, cast, get_args

from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from farandole.config import Config
from farandole.errors import ConfigError
from farandole.launch.backend import Call
from farandole.launch.environment import without_torch
from farandole.launch.output import Output
from farandole.launch.pickling import describe, dump_call
from farandole.launch.run import run_call
from farandole.spark.driver.display import Display
from farandole.spark.driver.log import Verbosity, show_on_console
from farandole.spark.jobs.barrier import run_barrier_job
from farandole.spark.jobs.session import started_session
from farandole.spark.jobs.slots import all_slots
from farandole.spark.rows.dataframes import collected, feeding, take_dataframes
from farandole.spark.rows.fed_rows import COLLECTED, FedRows

log = logging.getLogger(__name__)

T = TypeVar("T")


class HorovodRunner:
    """Runs a training function on `np` ranks.

    np > 0 runs a Spark job with a barrier task for each `ranks_per_task` ranks. np < 0 starts -np processes on the
    driver. np = 0 uses all slots; it is deprecated, because the number of slots grows while executors register. With
    `driver_log_verbosity="all"` the driver shows all output of the ranks, otherwise only messages of `log_to_driver`.
    The task requests of `resource_profile` set the CPUs and GPUs of each task, for this job alone. The ranks of a task
    divide its GPUs evenly."""

    def __init__(
        self,
        *,
        np: SupportsIndex,
        driver_log_verbosity: Verbosity = "log_callback_only",
        resource_profile: ResourceProfile | None = None,
        ranks_per_task: int = 1,
    ) -> None:
        if isinstance(np, bool) or not isinstance(np, SupportsIndex):
            raise TypeError(f"np must be a whole number, got {np!r}")
        np = index(np)  # of a number of NumPy too
        if driver_log_verbosity not in get_args(Verbosity):
            raise ConfigError(
                "driver_log_verbosity", f"must be one of {get_args(Verbosity)}, got {driver_log_verbosity!r}"
            )
        given = {"resource_profile": resource_profile is not None, "ranks_per_task": ranks_per_task != 1}
        for name in (name for name, there in given.items() if there and np < 0):
            log.warning(
                "%s has no effect with np=%d, which starts processes on the driver and no Spark tasks", name, np
            )
        self.num_processor = np
        self.driver_log_verbosity: Verbosity = driver_log_verbosity
        self._profile, self._ranks_per_task = resource_profile, ranks_per_task

    def run(self, main: Callable[..., T], **kwargs: object) -> T:
        """Call `main(**kwargs)` on every rank and return rank 0's value.

        In place of a DataFrame argument `main` receives the rank's share of its rows, of which
        `farandole.data.FeedLoader` makes batches. Starts a Spark session if there is none. Blocks until all ranks have
        ended. Raises `SlotsError` if the cluster has too few slots, `PicklingError` if `main` or an argument cannot be
        pickled, `ConfigError` if Java does not start, and the `RankFailed` of the rank that failed first, with the
        rank's own exception as its cause."""
        if self.num_processor < 0:
            return self._run_locally(main, kwargs)
        spark = started_session()
        description = f"HorovodRunner: {getattr(main, '__name__', type(main).__name__)}"
        with Display(description) as display:
            values = run_barrier_job(
                spark,
                main,
                kwargs=kwargs,
                num_proc=self.num_processor or self._all_slots(spark),
                description=description,
                verbosity=self.driver_log_verbosity,
                env=without_torch({}),
                results="first",
                on_message=display.show,
                on_pickled=lambda call: self._announce(main, call),
                profile=self._profile,
                ranks_per_task=self._ranks_per_task,
            )
        return values[0]

    def _run_locally(self, main: Callable[..., T], kwargs: Mapping[str, object]) -> T:
        num_proc = -self.num_processor
        _, named, dataframes = take_dataframes((), kwargs)
        with feeding(dataframes):
            call = dump_call(main, (), named)  # adds the DataFrames of converters
        self._announce(main, call)
        with collected(dataframes, num_proc) as rows, feeding(dataframes, rows), Output(num_proc) as output:
            if rows:
                located = {
                    name: rows[value.number] if isinstance(value, FedRows) else value for name, value in named.items()
                }
                call = dump_call(main, (), located)  # now with the paths of the rows' files
            start_timeout = Config.from_environment().start_timeout
            task = Call(call, sys.executable, start_timeout, runner=COLLECTED, keep_all=False)
            return cast(T, run_call(task, num_proc, without_torch(os.environ), output)[0])

    def _all_slots(self, spark: SparkSession) -> int:
        warnings.warn(
            "HorovodRunner(np=0) is deprecated: executors that register later are not counted; give a number",
            DeprecationWarning,
            stacklevel=3,
        )
        patience = Config.from_environment().start_timeout
        return all_slots(spark, patience=patience, profile=self._profile, ranks_per_task=self._ranks_per_task)

    def _announce(self, main: Callable[..., object], call: bytes) -> None:
        """Show the size of the call and the globals of `main`: an unexpected global is a frequent cause of failures."""
        report = describe(main, call)
        names = "{" + ", ".join(report.globals) + "}"
        announce(
            f"The global names read or written to by the pickled function are {names}.\n"
            f"The pickled object size is {report.size} bytes.\n"
            f"{_where_output_goes(self.num_processor, self.driver_log_verbosity)}"
            "To see when ranks wait for each other, set HOROVOD_TIMELINE on the driver before this.\n"
        )


def announce(text: str) -> None:
    """Log `text` for the user; write it to stderr if the logger drops INFO messages."""
    if log.isEnabledFor(logging.INFO):
        for line in text.splitlines():
            log.info("%s", line)
    else:
        show_on_console("stderr", text)


def _where_output_goes(np: int, verbosity: Verbosity) -> str:
    if np < 0:
        return ""
    if verbosity == "all":
        return (
            "HorovodRunner will stream all training logs here. If there are too many, adjust the log level or set "
            'driver_log_verbosity to "log_callback_only".\n'
        )
    return 'The ranks\' output is in the logs of the executors; driver_log_verbosity="all" brings it here.\n'
