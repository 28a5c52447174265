"""`farandole.spark.run_elastic`: ranks in the tasks of an ordinary Spark job, which goes on when executors are lost."""

import functools
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import TextIO, TypeVar

import pyarrow as pa
import pyspark
from pyspark import InheritableThread, TaskContext
from pyspark.sql import SparkSession

from farandole.config import Config
from farandole.errors import ConfigError, RankFailed
from farandole.launch.backend import Assignment, Call, OnEnd, OnLine, Rank, Task
from farandole.launch.backends.local import LocalAgent
from farandole.launch.elastic.callers import Callers, call_launcher
from farandole.launch.elastic.job import ElasticJob, open_elastic_job
from farandole.launch.elastic.options import Elastic
from farandole.launch.environment import checked_variables
from farandole.launch.pickling import dump_call, load_value
from farandole.meeting.addresses import join_address
from farandole.meeting.handshake import new_secret
from farandole.other_launchers import note_launches
from farandole.spark.driver.log import show_on_console
from farandole.spark.jobs.application import Application
from farandole.spark.jobs.barrier import passed_on
from farandole.spark.jobs.child import RUNNER
from farandole.spark.jobs.chosen import application_of
from farandole.spark.jobs.failure import cancellation, python_traceback
from farandole.spark.jobs.interpreter import interpreter_error, use_own_interpreter
from farandole.spark.jobs.session import active_session, interface_of, shown_on
from farandole.spark.jobs.task import executor_environment
from farandole.spark.rows.dataframes import feeding, take_dataframes

T = TypeVar("T")

LEAVE = 2.0  # seconds for Spark's tasks to end after the training, before they are cancelled
_THREADS = "OMP_NUM_THREADS"


def run_elastic(
    fn: Callable[..., T],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
) -> list[T]:
    """Call `fn(*args, **kwargs)` on ranks that may be lost and replaced; return the values of the last ranks.

    The job begins with `num_proc` ranks (default: Spark's default parallelism), goes on with `min_num_proc` or more,
    and grows to `max_num_proc`; both default to `num_proc`. Each rank runs in a task of an ordinary Spark job. Spark
    runs a lost task again, on another executor perhaps, and a new rank begins there. `fn` uses `farandole.elastic`, see
    there. Blocks until the ranks have ended; Ctrl-C ends them. `start_timeout` and `elastic_timeout` are in seconds;
    for the other arguments see `run`. DataFrames are no arguments of an elastic job.

    Raises `SlotsTimeout` if Spark starts fewer than `min_num_proc` tasks within `start_timeout`, `PicklingError` if the
    call cannot be pickled, `JobCancelled`, and the `RankFailed` of the failure that has ended the training."""
    spark = active_session()
    application = application_of(spark)
    variables = {**passed_on(os.environ), **checked_variables(env)}
    if nics is not None:
        variables["FARANDOLE_INTERFACE"] = interface_of(nics)
    threads = application.settings.get(f"spark.executorEnv.{_THREADS}")
    if threads is not None:
        variables.setdefault(_THREADS, threads)
    times = {"start_timeout": start_timeout, "elastic_timeout": elastic_timeout}
    settings = Config.from_environment(variables, **{name: each for name, each in times.items() if each is not None})
    sizes = Elastic(min_num_proc=min_num_proc, max_num_proc=max_num_proc, reset_limit=reset_limit)
    limits = sizes.limits(application.parallelism() if num_proc is None else num_proc, settings)
    call = Call(_dump(fn, args, kwargs or {}), "", settings.start_timeout, runner=RUNNER)
    use_own_interpreter(spark)
    name = f"farandole.spark.run_elastic: {getattr(fn, '__name__', type(fn).__name__)}"
    show = shown_on(stdout, stderr, prefix_output_with_timestamp)
    with ExitStack() as stack:
        cancel = stack.enter_context(application.job_group(f"farandole-{os.urandom(4).hex()}", name))
        tasks = _Tasks(spark, application, settings, limits.most, streams=bool(verbose), cancel=cancel)
        stack.callback(tasks.close)
        where = f"Spark ({application.master})"
        tasks.callers.wait_for(limits.least, settings.start_timeout, where, tasks.check)
        job = stack.enter_context(open_elastic_job(limits, tasks.callers, tasks.callers.backend_of, variables))
        stack.callback(tasks.callers.refuse_others)
        tasks.follow(job)
        failure = job.run(call, lambda rank, stream, line: show(stream, f"[{rank}] {line}\n"))
        if failure is not None:
            tasks.check()
            raise failure.error() from failure.cause
        return [load_value(rank, value) for rank, value in enumerate(job.values())]


def _dump(fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
    given, named, dataframes = take_dataframes(args, kwargs)
    with feeding(dataframes):
        call = dump_call(fn, given, named)
    if dataframes:
        problem = "has a DataFrame, and the ranks of an elastic job get no shares of its rows; write it to files"
        raise ConfigError("args", problem)
    return call


class _Tasks:
    """The tasks of the Spark job, which call the driver as agents; each serves it until `close`."""

    def __init__(
        self,
        spark: SparkSession,
        application: Application,
        settings: Config,
        number: int,
        *,
        streams: bool,
        cancel: Callable[[], None],
    ) -> None:
        self._spark, self._cancel = spark, cancel
        self._ended: Future[None] = Future()
        host = application.driver_host(settings.interface or "", settings.start_timeout)
        secret = new_secret()
        try:
            self.callers = Callers(secret, host.bind)
        except OSError as error:
            raise ConfigError(host.setting, f"the driver cannot listen on {host.bind} ({error})") from error
        echo = not (streams and application.shares_terminal)  # each line once
        launcher = join_address(host.name, self.callers.port)
        task = functools.partial(_serve, launcher, secret, settings.start_timeout, echo, streams)
        self._stage = spark.range(0, number, 1, number).mapInArrow(task, "none int")
        session = {} if pyspark.__version__.startswith("3.") else {"session": spark}
        self._thread = InheritableThread(target=self._run, name="farandole-tasks", daemon=True, **session)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the Spark job, if it has ended."""
        error = self._ended.exception() if self._ended.done() else None
        if error is not None:
            known = interpreter_error(self._spark, str(error)) or cancellation(str(error))
            raise known or _abortion(str(error)) from error

    def follow(self, job: ElasticJob) -> None:
        """End the elastic job when Spark ends its tasks."""
        self._ended.add_done_callback(lambda _: job.give_up("Spark has ended its tasks"))

    def close(self) -> None:
        """End the connections to the tasks, and the tasks with their ranks."""
        self.callers.close()
        wait([self._ended], timeout=LEAVE)
        if not self._ended.done():
            self._cancel()  # tasks that wait for a slot
        self._thread.join(LEAVE)

    def _run(self) -> None:
        try:
            self._stage.collect()
            self._ended.set_result(None)
        except BaseException as error:
            self._ended.set_exception(error)


def _abortion(text: str) -> RankFailed:
    """Return the error of a Spark job that was aborted, given the text of Spark's exception."""
    reason = re.search(r"aborted due to stage failure: ([^\n]+)", text)
    why = f"Spark has given up its tasks (see spark.task.maxFailures): {reason[1] if reason else text.splitlines()[0]}"
    return RankFailed(0, why, python_traceback(text))


def _serve(
    launcher: str,
    secret: bytes,
    timeout: timedelta,
    echo: bool,
    streams: bool,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Serve the driver as an agent with one slot, until the training has ended; a function for `mapInArrow`."""
    task = TaskContext.get()
    assert task is not None
    with _TaskAgent(echo, streams) as agent:
        gpu = task.resources().get("gpu")
        agent.gpus = gpu.addresses if gpu else ()
        name = f"{socket.gethostname()}/task-{task.partitionId()}.{task.attemptNumber()}"
        call_launcher(launcher, secret, name, agent, timeout)
    yield from ()


class _TaskAgent(LocalAgent):
    """The agent in a task; its rank gets the executor's environment, and its lines go to the executor's log, too."""

    def __init__(self, echo: bool, streams: bool) -> None:
        super().__init__(on_message=self._note_message)
        self._echo, self._streams = echo, streams
        self._send: OnLine | None = None

    def start(self, assignment: Assignment, task: Task, on_line: OnLine, on_end: OnEnd) -> Rank:
        """Start the rank."""
        self._send = on_line
        env = {**executor_environment(), **assignment.env}
        return super().start(replace(assignment, env=env | note_launches(env)), task, self._note_line, on_end)

    def _note_line(self, rank: int, stream: str, line: str) -> None:
        if self._echo:
            show_on_console(stream, f"[{rank}] {line}\n")
        if self._streams and self._send is not None:
            self._send(rank, stream, line)

    def _note_message(self, rank: int, kind: str, content: Mapping[str, object]) -> None:
        if kind == "log" and self._send is not None:
            self._send(rank, "stdout", str(content["text"]))
