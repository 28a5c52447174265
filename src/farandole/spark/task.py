"""One barrier task: it starts its rank as a child process, meets the other tasks, and ends as its rank ends."""

import dataclasses
import ipaddress
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeAlias

import pyarrow as pa
from pyspark import BarrierTaskContext

from farandole.config import Config
from farandole.errors import ConfigError
from farandole.handshake import split_address
from farandole.launch.calls import RankCall
from farandole.launch.channel import Orders
from farandole.launch.cores import available_cores, threads_per_rank
from farandole.launch.failures import Failure, to_payload
from farandole.launch.reserved import ReservedPort
from farandole.other_launchers import note_launches
from farandole.rendezvous import RendezvousServer
from farandole.spark.addresses import address_toward, bindable_address
from farandole.spark.child import RUNNER
from farandole.spark.disks import local_directory
from farandole.spark.exchange.gather import gather_rows
from farandole.spark.relay import Relay
from farandole.spark.spill import Spill
from farandole.topology import JobEnvironment, Topology, host_identity, interface_address

if TYPE_CHECKING:  # PySpark's client of Spark Connect alone has none
    from pyspark import Broadcast

__all__ = ["RESULT_SCHEMA", "TaskOrders", "TaskPlan", "run_task"]

RESULT_SCHEMA = "rank int, part int, chunk binary"
_ARROW_RESULT = pa.schema([("rank", pa.int32()), ("part", pa.int32()), ("chunk", pa.binary())])
CHUNK = 4 << 20  # bytes of a result per row

GRACE = timedelta(seconds=1)  # for a rank whose job is over
GONE = timedelta(seconds=10)  # for what is left of a rank after SIGKILL
FLUSH = timedelta(seconds=2)  # for the last messages to the driver
HOLD_BACK = 5.0  # seconds in which Spark kills the task of a rank that failed only because another one did

# Not for the ranks: Spark's number of threads (a task's cores, usually 1), and the key to its Python workers.
_SPARKS_OWN = ("OMP_NUM_THREADS", "PYTHON_WORKER_FACTORY_SECRET")

Event: TypeAlias = tuple[Literal["met"], list[str]] | tuple[Literal["broken"], Exception] | tuple[Literal["ended"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """The description of a job for each of its tasks, but for the secret: Spark may write a large one to a disk."""

    job: str
    num_proc: int
    call: bytes = field(repr=False)  # the pickled (function, args, kwargs)
    env: Mapping[str, str]  # for the ranks; comes after the executor's own
    threads_set: bool  # the user has chosen OMP_NUM_THREADS
    driver_log: str  # host:port
    stream: bool  # show every line on the driver
    echo: bool  # show every line in the executor's log
    keep_all: bool  # return every rank's value, not rank 0's alone
    schemas: Sequence[bytes]  # of the DataFrames, as Arrow writes them; then Spark brings where their rows are
    executable: str
    start_timeout: timedelta

    @property
    def size(self) -> int:
        """The bytes of what may be large."""
        return len(self.call) + sum(map(len, self.schemas))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrders:
    """A job's secret, and its plan or a broadcast of it; small enough that Spark keeps it in memory."""

    secret: bytes = field(repr=False)
    plan: "TaskPlan | Broadcast[TaskPlan]"


def run_task(orders: TaskOrders, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run one rank and yield its pickled value in pieces; raises `RankFailed` when the rank fails.

    The function of `mapInArrow`. Whatever ends the task ends the rank: its guard sees to that where no code of this
    process runs any more (Spark kills Python workers with SIGKILL)."""
    context = BarrierTaskContext.get()
    plan = orders.plan if isinstance(orders.plan, TaskPlan) else orders.plan.value
    value = RankTask(plan, orders.secret, context).run(batches)
    for part, start in enumerate(range(0, max(1, len(value)), CHUNK)):
        columns = [[context.partitionId()], [part], [value[start : start + CHUNK]]]
        yield pa.RecordBatch.from_arrays(
            [pa.array(column, kind.type) for column, kind in zip(columns, _ARROW_RESULT, strict=True)],
            schema=_ARROW_RESULT,
        )


class RankTask:
    """The life of one task."""

    def __init__(self, plan: TaskPlan, secret: bytes, context: BarrierTaskContext) -> None:
        self.plan = plan
        self._secret = secret
        self.context = context
        self.rank = context.partitionId()
        self.hosts = [split_address(info.address)[0] for info in context.getTaskInfos()]
        if len(self.hosts) != plan.num_proc:
            raise ConfigError(
                "num_proc", f"is {plan.num_proc}, but the DataFrame has {len(self.hosts)} partitions; repartition it"
            )
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._call: RankCall | None = None
        self._env = self._environment()
        self._relay: Relay

    def run(self, batches: Iterable[pa.RecordBatch]) -> bytes:
        """Run the rank from start to end; its pickled value."""
        self._relay = Relay(
            self.plan.driver_log, self.rank, self._secret, self._cancel, lambda met: self._events.put(("met", met))
        )
        self._relay.send("begin", {"stage": self.context.stageId()}, must=True)
        failure: Failure | None = None
        try:
            call, failure = self._live(batches)
            if failure is None:
                self._relay.send("done", {}, must=True)
        except Exception as error:
            failure = self._own_failure(error)
            raise
        finally:
            if failure is not None:
                self._relay.send("failed", to_payload(failure), must=True)
            self._relay.close(FLUSH)
        if failure is None:
            return call.value()
        if failure.consequence:
            # Spark kills this process meanwhile: its task shows as killed, and the guilty rank's as failed.
            time.sleep(HOLD_BACK)
        raise failure.error() from None

    def _live(self, batches: Iterable[pa.RecordBatch]) -> tuple[RankCall, Failure | None]:
        """Start the rank, let it begin when all tasks have met, wait for its end; leaves nothing of it behind."""
        with ExitStack() as stack:
            # First of all: its imports go on while the rows are written and the tasks meet.
            call = self._call = self._start()
            stack.callback(self._end, call)
            if self._cancelled.is_set():  # before there was anything to end
                call.terminate(GRACE)
            server = stack.enter_context(self._serve()) if self.rank == 0 else None
            torch_port = stack.enter_context(ReservedPort()).port if self.rank == 0 else 0
            all_gather = self._meet(server.address if server is not None else "", torch_port)
            rows = self._rows(batches)
            for each in rows:
                stack.callback(each.close)
            if rows:
                self._relay.send("fed", {}, must=True)
            event = self._events.get()
            if event[0] == "broken":
                # So it does when another task has failed, which then is the one that Spark names.
                return call, dataclasses.replace(self._own_failure(event[1]), consequence=True)
            if event[0] == "met":
                met = [json.loads(each) for each in event[1]]
                call.begin(
                    Orders(
                        env=self._place(met),
                        fds=[each.file.fileno() for each in rows],
                        keep=self.plan.keep_all or self.rank == 0,
                    )
                )
                self._wait_for_end()
                # Left alone, it would go on in Spark's executor after the task.
                all_gather.join(GONE.total_seconds())
            # Before the rank is ended here, which is no failure of its own.
            return call, self._failure(call)

    def _environment(self) -> dict[str, str]:
        """Return the environment of the rank's process: the executor's variables, overridden by the driver's."""
        env = {name: value for name, value in os.environ.items() if name not in _SPARKS_OWN}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if self.plan.threads_set and "OMP_NUM_THREADS" in os.environ:
            env["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
        else:
            here = self.hosts.count(self.hosts[self.rank])
            env["OMP_NUM_THREADS"] = str(threads_per_rank(available_cores(), here))
        env.update(self.plan.env)
        return env

    def _start(self) -> RankCall:
        return RankCall.start(
            self.plan.call,
            self._env,
            rank=self.rank,
            on_line=self._on_line,
            executable=self.plan.executable,
            start_timeout=self.plan.start_timeout,
            orders=None,
            runner=RUNNER,
            on_message=lambda kind, payload: self._relay.send(kind, payload, must=kind == "log"),
            on_end=lambda _: self._events.put(("ended",)),
        )

    def _serve(self) -> RendezvousServer:
        # The ranks then listen where they find the way to this address.
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

    def _rows(self, batches: Iterable[pa.RecordBatch]) -> list[Spill]:
        """Bring this rank's rows of each DataFrame to a file."""
        schemas = [pa.ipc.read_schema(pa.py_buffer(schema)) for schema in self.plan.schemas]
        directory = local_directory(os.environ, self.hosts[: self.rank].count(self.hosts[self.rank]))
        if schemas:
            secret = self._secret
            return gather_rows(batches, schemas, directory, secret, rank=self.rank, stop=self._has_failed)
        for _ in batches:
            pass  # the one row that made this task
        return []

    def _has_failed(self) -> bool:
        return self._call is not None and self._call.failure is not None

    def _meet(self, rendezvous: str, torch_port: int) -> threading.Thread:
        """Exchange what each task knows; the answer is an event, as is the end of the rank, which may come before.

        By way of the driver's log, which takes milliseconds, and at the same time by Spark's all-gather, which takes a
        second, as it looks for its answer that often, but needs no log and tells attempts of a stage apart. What comes
        second says what came first. Returns the thread that waits for Spark."""
        gpu = self.context.resources().get("gpu")
        gpus = gpu.addresses if gpu else []
        mine = {"host": host_identity(), "gpus": gpus, "rendezvous": rendezvous, "torch_port": torch_port}

        text = json.dumps(mine)
        self._relay.send("meet", {"stage": self.context.stageId(), "text": text}, must=True)

        def gather() -> None:
            try:
                self._events.put(("met", self.context.allGather(text)))
            except Exception as error:
                self._events.put(("broken", error))

        thread = threading.Thread(target=gather, name="farandole-all-gather", daemon=True)
        thread.start()
        return thread

    def _place(self, met: list[dict[str, object]]) -> dict[str, str]:
        """The variables that tell the rank its place among all ranks."""
        place = Topology.from_hosts(self.rank, [str(each["host"]) for each in met])
        rendezvous, torch_port = str(met[0]["rendezvous"]), met[0]["torch_port"]
        assert isinstance(torch_port, int)
        job = JobEnvironment.of(place, rendezvous=rendezvous, secret=self._secret, job=self.plan.job)
        env = job.write(torch_store=(split_address(rendezvous)[0], torch_port)) | note_launches(self._env)
        gpus = visible_gpus([met[rank]["gpus"] for rank in place.local_ranks])
        if gpus and "CUDA_VISIBLE_DEVICES" not in self.plan.env:
            env["CUDA_VISIBLE_DEVICES"] = gpus
        return env

    def _own_address(self) -> str:
        """The address by which other executors reach this one, "" if Spark's name for it is no address of it."""
        own = bindable_address(self.hosts[self.rank])
        if len(set(self.hosts)) > 1 and own and ipaddress.ip_address(own).is_loopback:
            # Debian's /etc/hosts, for one, gives a machine's own name a loopback address.
            return address_toward(*split_address(self.plan.driver_log))
        return own

    def _wait_for_end(self) -> None:
        # Trainings take days; what ends the wait in any case is Spark's end of the task, by SIGKILL.
        while self._events.get()[0] != "ended":
            pass

    def _on_line(self, rank: int, stream: str, line: str) -> None:
        if self.plan.echo:
            target = sys.stderr if stream == "stderr" else sys.stdout
            target.write(f"[{rank}] {line}\n")
            target.flush()
        if self.plan.stream:
            self._relay.send("line", {"stream": stream, "text": line})

    def _cancel(self, reason: str) -> None:
        """The driver says that the job is over; Spark's own kill comes seconds later, and by SIGKILL."""
        self._cancelled.set()
        if self._call is not None:
            self._call.terminate(GRACE)

    def _end(self, call: RankCall) -> None:
        """Leave nothing of the rank behind."""
        if self._cancelled.is_set() or not call.wait(timedelta(0)):
            call.terminate(GRACE)
        call.wait_gone(GONE)
        call.wait(FLUSH)  # its last messages are in the channel

    def _failure(self, call: RankCall) -> Failure | None:
        """Return how the rank failed; one that was ended because the job was over did not fail first."""
        failure = call.failure
        if failure is not None and self._cancelled.is_set():
            return dataclasses.replace(failure, consequence=True, killed=False)
        return failure

    def _own_failure(self, error: Exception) -> Failure:
        """The failure of the task itself, which its rank could not help."""
        lines = traceback.format_exception(error)
        return Failure(rank=self.rank, reason=lines[-1].strip(), code=1, traceback="".join(lines), cause=error)


def visible_gpus(by_local_rank: list[object]) -> str:
    """The GPUs of a host's ranks such that local rank i finds its own at index i, as user code expects; "" for none.

    Further GPUs of a rank come after those."""
    lists = [[str(gpu) for gpu in gpus] for gpus in by_local_rank if isinstance(gpus, list)]
    ordered = [gpus[0] for gpus in lists if gpus] + [gpu for gpus in lists for gpu in gpus[1:]]
    return ",".join(dict.fromkeys(ordered))
