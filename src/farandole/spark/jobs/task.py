"""Barrier task, which starts its ranks as child processes, meets the other tasks, and ends as its ranks end."""

import dataclasses
import ipaddress
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Literal, TypeAlias

import pyarrow as pa
from pyspark import BarrierTaskContext

from farandole.config import Config
from farandole.cores import available_cores, threads_per_rank
from farandole.errors import ConfigError
from farandole.launch.calls import RankCall
from farandole.launch.channel import Orders
from farandole.launch.environment import wants_torch
from farandole.launch.failures import Failure, culprit, to_payload
from farandole.launch.reserved import ReservedPort
from farandole.meeting.addresses import join_address, split_address
from farandole.meeting.rendezvous import RendezvousServer
from farandole.other_launchers import note_launches
from farandole.spark.driver.relay import Relay
from farandole.spark.jobs.addresses import address_toward, bindable_address
from farandole.spark.jobs.child import RUNNER
from farandole.spark.jobs.gpus import divide, visible_gpus
from farandole.spark.jobs.plan import TaskOrders, TaskPlan
from farandole.spark.rows.disks import local_directory
from farandole.spark.rows.exchange.gather import gather_rows
from farandole.spark.rows.spill import Spill
from farandole.topology import (
    OF_ONE_PROCESS,
    JobEnvironment,
    Topology,
    host_identity,
    host_name,
    interface_address,
)

RESULT_SCHEMA = "rank int, part int, chunk binary"
_ARROW_RESULT = pa.schema([("rank", pa.int32()), ("part", pa.int32()), ("chunk", pa.binary())])
CHUNK = 4 << 20  # bytes of a result per row

GRACE = timedelta(seconds=1)  # for a rank to end with its job, or to report that it has lost another rank
GONE = timedelta(seconds=10)  # for a rank's processes to end after SIGKILL
FLUSH = timedelta(seconds=2)  # for the last messages to the driver
HOLD_BACK = 5.0  # seconds for Spark to kill this task, if its ranks failed only because another rank did

# Variables that ranks do not inherit: Spark's number of threads (a task's cores, usually 1), and the secret of its
# Python workers.
_SPARKS_OWN = ("OMP_NUM_THREADS", "PYTHON_WORKER_FACTORY_SECRET")

Event: TypeAlias = (
    tuple[Literal["met"], list[str]] | tuple[Literal["broken"], Exception] | tuple[Literal["ended"], RankCall]
)


def run_task(orders: TaskOrders, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run the task's ranks and yield their pickled values in pieces; raises `RankFailed` when a rank fails.

    A function for `mapInArrow`. The ranks end with the task, however it ends: if Spark kills this process with SIGKILL,
    the ranks' guards end them."""
    plan = orders.plan if isinstance(orders.plan, TaskPlan) else orders.plan.value
    values = Task(plan, orders.secret, BarrierTaskContext.get()).run(batches)
    for rank, value in values.items():
        for part, start in enumerate(range(0, max(1, len(value)), CHUNK)):
            columns = [[rank], [part], [value[start : start + CHUNK]]]
            yield pa.RecordBatch.from_arrays(
                [pa.array(column, kind.type) for column, kind in zip(columns, _ARROW_RESULT, strict=True)],
                schema=_ARROW_RESULT,
            )


def executor_environment() -> dict[str, str]:
    """Return the executor's variables for a rank that starts below its task, with the task's path of modules."""
    env = {name: value for name, value in os.environ.items() if name not in {*_SPARKS_OWN, *OF_ONE_PROCESS}}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return env


class Task:
    """One barrier task and its ranks."""

    def __init__(self, plan: TaskPlan, secret: bytes, context: BarrierTaskContext) -> None:
        self.plan = plan
        self._secret = secret
        self.context = context
        first, each = context.partitionId() * plan.ranks_per_task, plan.ranks_per_task
        self.ranks = range(first, first + each)
        tasks = [split_address(info.address)[0] for info in context.getTaskInfos()]
        if len(tasks) * each != plan.num_proc:
            raise ConfigError(
                "num_proc",
                f"is {plan.num_proc}, but the DataFrame has {len(tasks)} partitions; repartition it to "
                f"{plan.num_proc // each}",
            )
        self.hosts = [host for host in tasks for _ in range(each)]  # by rank
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._calls: dict[int, RankCall] = {}
        self._relays: dict[int, Relay] = {}
        self._env = self._environment()

    def run(self, batches: Iterable[pa.RecordBatch]) -> dict[int, bytes]:
        """Run the ranks until they have ended; return their pickled values by rank. Raises `RankFailed`."""
        for rank in self.ranks:
            relay = Relay(
                self.plan.driver_log, rank, self._secret, self._cancel, lambda met: self._events.put(("met", met))
            )
            relay.send("begin", {"stage": self.context.stageId()}, must=True)
            self._relays[rank] = relay
        failures: Mapping[int, Failure] = {}
        try:
            failures = self._run_ranks(batches)
            for rank in self.ranks:
                if rank not in failures:
                    self._relays[rank].send("done", {}, must=True)
        except Exception as error:
            failures = self._own_failures(error)
            raise
        finally:
            for rank, failed in failures.items():
                self._relays[rank].send("failed", to_payload(failed), must=True)
            until = time.monotonic() + FLUSH.total_seconds()
            for relay in self._relays.values():
                relay.close(_left(until))
        if not failures:
            return {rank: call.value() for rank, call in self._calls.items()}
        failure = culprit([*failures.values()])
        if failure.consequence:
            # Spark kills this process meanwhile. So its UI shows this task as killed, and the failed rank's as failed.
            time.sleep(HOLD_BACK)
        raise failure.error() from None

    def _run_ranks(self, batches: Iterable[pa.RecordBatch]) -> Mapping[int, Failure]:
        """Start the ranks, let them begin when all tasks have met, and wait for their end; return the failures by rank.

        Ends all processes of the ranks before it returns or raises."""
        with ExitStack() as stack:
            # Ranks start first, and import modules while the rows are gathered and the tasks meet.
            stack.callback(self._end)
            for rank in self.ranks:
                self._calls[rank] = self._start(rank)
            if self._cancelled.is_set():  # perhaps before these ranks had started
                self._terminate()
            server = stack.enter_context(self._serve()) if 0 in self.ranks else None
            torch_port = stack.enter_context(ReservedPort()).port if 0 in self.ranks else 0
            all_gather = self._meet(server.address if server is not None else "", torch_port)
            rows = self._rows(batches, stack)
            event = self._events.get()
            if event[0] == "broken":
                # The all-gather also fails when another task has failed; Spark names that task.
                own = self._own_failures(event[1])
                return {rank: dataclasses.replace(failure, consequence=True) for rank, failure in own.items()}
            if event[0] == "met":
                met = [json.loads(each) for each in event[1]]
                for rank, call in self._calls.items():
                    files = [each.file.fileno() for each in rows.get(rank, ())]
                    keep = self.plan.keep_all or rank == 0
                    call.begin(Orders(env=self._place(rank, met), fds=files, keep=keep))
                self._wait_for_end()
                # Otherwise the thread could outlive the task in Spark's Python worker.
                all_gather.join(GONE.total_seconds())
            # Before `_end` ends ranks, which is not a failure of theirs.
            return self._failures()

    def _environment(self) -> dict[str, str]:
        """Return the environment of the ranks' processes: the executor's variables, overridden by the driver's."""
        env = executor_environment()
        if self.plan.threads_set and "OMP_NUM_THREADS" in os.environ:
            env["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
        else:
            here = self.hosts.count(self.hosts[self.ranks[0]])
            env["OMP_NUM_THREADS"] = str(threads_per_rank(available_cores(), here))
        env.update(self.plan.env)
        return env

    def _start(self, rank: int) -> RankCall:
        relay = self._relays[rank]
        return RankCall.start(
            self.plan.call,
            self._env,
            rank=rank,
            on_line=self._on_line,
            executable=self.plan.executable,
            start_timeout=self.plan.start_timeout,
            orders=None,
            runner=RUNNER,
            on_message=relay.send,
            on_end=lambda call: self._events.put(("ended", call)),
        )

    def _serve(self) -> RendezvousServer:
        # The ranks listen on the interface that leads to this address.
        interface = Config.from_environment(self._env).interface
        host = interface_address(interface) if interface else self._own_address() or self.hosts[0]
        try:
            return RendezvousServer(self.plan.num_proc, self._secret, host=host)
        except OSError as error:
            raise ConfigError(
                "FARANDOLE_INTERFACE",
                f"rank 0 cannot listen on {host}, the address that Spark knows its executor by ({error}); "
                "name an interface that the other executors reach",
            ) from error

    def _rows(self, batches: Iterable[pa.RecordBatch], stack: ExitStack) -> dict[int, list[Spill]]:
        """Copy each rank's rows of each DataFrame to a file, which `stack` closes; return the files by rank."""
        schemas = [pa.ipc.read_schema(pa.py_buffer(schema)) for schema in self.plan.schemas]
        shares = list(batches)  # without DataFrames: the one row for which Spark started this task
        rows: dict[int, list[Spill]] = {}
        for rank in self.ranks if schemas else ():
            directory = local_directory(os.environ, self.hosts[:rank].count(self.hosts[rank]))
            rows[rank] = gather_rows(shares, schemas, directory, self._secret, rank=rank, stop=self._has_failed)
            for each in rows[rank]:
                stack.callback(each.close)
            self._relays[rank].send("fed", {}, must=True)
        return rows

    def _has_failed(self) -> bool:
        return any(call.failure is not None for call in self._calls.values())

    def _meet(self, rendezvous: str, torch_port: int) -> threading.Thread:
        """Exchange host, GPUs, rendezvous and port of all ranks, without blocking; return the all-gather's thread.

        The result is an event. A rank may end before it, which is an event, too. The exchange takes two ways at once,
        with the same result. The driver's log takes milliseconds. Spark's all-gather takes a second, the interval in
        which it polls, but needs no connection to the driver's log and keeps attempts of a stage apart."""
        gpu = self.context.resources().get("gpu")
        texts = []
        for rank, gpus in zip(self.ranks, divide(gpu.addresses if gpu else [], len(self.ranks)), strict=True):
            mine = {"host": host_identity(), "gpus": gpus, "rendezvous": rendezvous, "torch_port": torch_port}
            texts.append(json.dumps(mine))
            self._relays[rank].send("meet", {"stage": self.context.stageId(), "text": texts[-1]}, must=True)

        def gather() -> None:
            try:
                tasks = self.context.allGather(json.dumps(texts))
                self._events.put(("met", [text for task in tasks for text in json.loads(task)]))
            except Exception as error:
                self._events.put(("broken", error))

        thread = threading.Thread(target=gather, name="farandole-all-gather", daemon=True)
        thread.start()
        return thread

    def _place(self, rank: int, met: list[dict[str, object]]) -> dict[str, str]:
        """Return the variables that tell `rank` its place among all ranks; `met` has the facts of each rank."""
        place = Topology.from_hosts(rank, [str(each["host"]) for each in met])
        rendezvous, torch_port = str(met[0]["rendezvous"]), met[0]["torch_port"]
        assert isinstance(torch_port, int)
        torch_store = join_address(split_address(rendezvous)[0], torch_port)
        job = JobEnvironment.of(
            place,
            host=host_name(place.hosts[rank]),
            rendezvous=rendezvous,
            secret=self._secret,
            job=self.plan.job,
            torch_store=torch_store,
        )
        env = job.write(torch_env=wants_torch(self._env)) | note_launches(self._env)
        gpus = visible_gpus([met[local]["gpus"] for local in place.local_ranks])
        if gpus and "CUDA_VISIBLE_DEVICES" not in self.plan.env:
            env["CUDA_VISIBLE_DEVICES"] = gpus
        return env

    def _own_address(self) -> str:
        """Return the address at which other executors reach this one; "" if Spark's name for it is no address of it."""
        own = bindable_address(self.hosts[self.ranks[0]])
        if len(set(self.hosts)) > 1 and own and ipaddress.ip_address(own).is_loopback:
            # Debian's /etc/hosts, for example, gives a machine's own name a loopback address.
            return address_toward(*split_address(self.plan.driver_log))
        return own

    def _wait_for_end(self) -> None:
        """Wait until all ranks have ended, or until one has failed and the others had `GRACE` to fail, too."""
        # Without a deadline, because trainings take days. When the job ends, Spark ends this process with SIGKILL.
        left = len(self.ranks)
        while left and not self._has_failed():
            left -= self._events.get()[0] == "ended"
        until = time.monotonic() + GRACE.total_seconds()
        for call in self._calls.values():
            call.wait(_left(until))

    def _on_line(self, rank: int, stream: str, line: str) -> None:
        if self.plan.echo:
            target = sys.stderr if stream == "stderr" else sys.stdout
            target.write(f"[{rank}] {line}\n")
            target.flush()
        if self.plan.stream:
            self._relays[rank].send("line", {"stream": stream, "text": line})

    def _cancel(self, reason: str) -> None:
        """End the ranks because the driver has ended the job; Spark's own SIGKILL comes seconds later."""
        self._cancelled.set()
        self._terminate()

    def _terminate(self) -> None:
        for call in [*self._calls.values()]:
            call.terminate(GRACE)

    def _end(self) -> None:
        """End the ranks; wait until their processes are gone and their messages have been received."""
        calls = [*self._calls.values()]
        for call in calls:
            if self._cancelled.is_set() or not call.wait(timedelta(0)):
                call.terminate(GRACE)
        until = time.monotonic() + GONE.total_seconds()
        for call in calls:
            call.wait_gone(_left(until))
        until = time.monotonic() + FLUSH.total_seconds()
        for call in calls:
            call.wait(_left(until))  # until the last messages have been read from its channel

    def _failures(self) -> dict[int, Failure]:
        """Return the ranks' failures; that of a rank that was ended with its job or task is a consequence."""
        failures = {rank: call.failure for rank, call in self._calls.items() if call.failure is not None}
        for rank, call in self._calls.items() if failures else ():
            if not call.wait(timedelta(0)):
                reason = "was ended because another rank of its task had failed"
                failures[rank] = Failure(rank=rank, reason=reason, code=1, consequence=True)
        if not self._cancelled.is_set():
            return failures
        return {rank: dataclasses.replace(each, consequence=True, killed=False) for rank, each in failures.items()}

    def _own_failures(self, error: Exception) -> dict[int, Failure]:
        """Return `error`, a failure of the task itself, as that of its first rank, and as a consequence for others."""
        lines = traceback.format_exception(error)
        first, *others = [
            Failure(rank=rank, reason=lines[-1].strip(), code=1, traceback="".join(lines), cause=error)
            for rank in self.ranks
        ]
        return {first.rank: first} | {each.rank: dataclasses.replace(each, consequence=True) for each in others}


def _left(until: float) -> timedelta:
    """Return the time from now until `until`, as `time.monotonic` counts; zero if that is over."""
    return timedelta(seconds=max(0.0, until - time.monotonic()))
