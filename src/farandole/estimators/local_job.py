"""An estimator's ranks without Spark: processes of this machine, which read their rows from files."""

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar

from farandole.config import Config
from farandole.launch.backend import Call
from farandole.launch.backends.local import LocalBackend
from farandole.launch.failures import Failure
from farandole.launch.job import open_job
from farandole.launch.pickling import dump_call
from farandole.spark.driver.log import OnMessage, Show
from farandole.spark.jobs.attempts import Attempts
from farandole.spark.jobs.child import RUNNER

T = TypeVar("T")


def run_local_ranks(
    task: Callable[[], T],
    *,
    num_proc: int,
    env: Mapping[str, str],
    max_attempts: int,
    on_message: OnMessage,
    show: Show,
    shows_lines: bool,
    executable: str = "",
    start_timeout: timedelta | None = None,
) -> T:
    """Run `task` on each of `num_proc` ranks of this machine; return rank 0's value.

    After a failure all ranks run again, as in a Spark job; there are `max_attempts` attempts at most. `show` receives
    the messages of `log_to_driver`, and with `shows_lines` all lines of the ranks. `executable` is the ranks' Python,
    by default this process's. Blocks until all ranks have ended; raises the `RankFailed` of the last attempt from the
    rank's own exception."""
    attempts = Attempts(max_attempts, 1)
    handle = attempts.watching(on_message)
    environment = {**os.environ, **env}
    timeout = Config.from_environment(environment).start_timeout if start_timeout is None else start_timeout
    call = Call(dump_call(task, (), {}), executable or sys.executable, timeout, runner=RUNNER, keep_all=False)

    def take(rank: int, kind: str, payload: Mapping[str, object]) -> None:
        if kind == "log":
            show("stdout", f"{payload['text']}\n")
        else:
            handle(rank, {**payload, "kind": kind})

    def on_line(rank: int, stream: str, line: str) -> None:
        if shows_lines:
            show(stream, f"[{rank}] {line}\n")

    failed: Failure | None = None
    number = 0
    while True:
        number += 1
        attempts.begin(number, failed)
        with open_job(num_proc, environment, backend=LocalBackend(num_proc, take)) as job:
            failed = job.run(call, on_line)
            if failed is None:
                value: T = pickle.loads(job.values()[0])
                return value
        if not attempts.go_on(failed):
            raise failed.error(attempts.earlier) from failed.cause
