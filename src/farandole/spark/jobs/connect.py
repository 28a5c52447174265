"""The application of a Spark Connect session, whose driver may be on another machine than this process."""

import contextlib
import functools
import logging
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from typing import Any

import pyarrow as pa
from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame, SparkSession

from farandole.errors import ConfigError, FarandoleError
from farandole.meeting.acceptor import AcceptingThread, Acceptor, Admitted, listen
from farandole.meeting.addresses import join_address
from farandole.meeting.dialer import dial
from farandole.meeting.frames import Deadline
from farandole.meeting.handshake import new_secret
from farandole.spark.jobs.addresses import address_toward
from farandole.spark.jobs.application import DriverHost, unless_stopped
from farandole.spark.jobs.plan import TaskOrders, TaskPlan
from farandole.topology import interface_addresses, own_addresses

log = logging.getLogger(__name__)

INTERRUPT_EVERY = 0.2  # seconds
TRY_TIMEOUT = timedelta(seconds=3)  # for a task's connection to one address
_REACHED_SCHEMA = "address string"
_ARROW_REACHED = pa.schema([("address", pa.string())])
_PARALLELISM = ("spark.default.parallelism", "spark.sql.leafNodeDefaultParallelism")
_SPLITS = re.compile(r"splits=(?:Some\()?(\d+)")


class ConnectApplication:
    """`Application` of a Spark Connect session, known through requests to its server.

    The server reports neither the executors nor the attempts of a stage."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark: Any = spark

    @property
    def master(self) -> str:
        return str(self._spark.conf.get("spark.master"))

    @functools.cached_property
    def settings(self) -> Mapping[str, str]:
        settings: dict[str, str] = self._spark.conf.getAll
        return settings

    @property
    def python(self) -> str:
        return "PYSPARK_PYTHON of the Spark Connect server"

    @property
    def shares_terminal(self) -> bool:
        return False  # a server on this machine is another process, with a log of its own

    def parallelism(self) -> int:
        # The protocol has no request for it, but a range without a number of partitions gets as many.
        plan: str = self._spark.range(1)._explain_string()
        found = _SPLITS.search(plan)
        assert found is not None, plan
        return int(found[1])

    def slots(self, task_cpus: int, profile: ResourceProfile | None) -> int | None:
        # The default parallelism is the number of cores unless it is set, and says nothing of GPUs.
        resources = any(name.startswith("spark.task.resource.") for name in self.settings)
        if profile is not None:
            resources = any(name != "cpus" for name in profile.taskResources)
        if resources or any(name in self.settings for name in _PARALLELISM):
            return None
        return self.parallelism() // task_cpus

    def driver_host(self, interface: str, patience: timedelta) -> DriverHost:
        addresses = candidates(str(self._spark.client.host), interface)
        address = reach(self._spark, addresses, patience)
        if address is None:
            raise ConfigError(
                "spark",
                f"is a Spark Connect session whose tasks reach this machine at none of {', '.join(addresses)}; they "
                "must connect to it with the ranks' output and failures, so run the program where executors reach it",
            )
        return DriverHost(bind=address, name=address, setting="spark")

    def attempt_of(self, stage: int) -> int:
        return 0

    def has_failed(self, stage: int, attempt: int) -> bool:
        return False

    @contextmanager
    def job_group(self, group: str, description: str) -> Iterator[Callable[[], None]]:
        # Spark Connect sets the description itself. Tags apply to this thread and to its InheritableThreads.
        self._spark.addTag(group)
        try:
            yield unless_stopped(self._spark, lambda: self._spark.interruptTag(group))
        finally:
            self._spark.removeTag(group)

    @contextmanager
    def handed_over(self, plan: TaskPlan, secret: bytes) -> Iterator[TaskOrders]:
        # The server sends functions of any size to executors through memory, not through files.
        yield TaskOrders(secret=secret, plan=plan)

    def repartitioned_to(self, dataframe: DataFrame) -> int | None:
        last: Any = dataframe._plan
        if type(last).__name__ == "RepartitionByExpression":
            return None if last.num_partitions is None else int(last.num_partitions)
        return int(last._num_partitions) if type(last).__name__ == "Repartition" and last._shuffle else None


def candidates(server: str, interface: str = "") -> list[str]:
    """Return this machine's addresses in the order in which to try them.

    First the addresses of `interface`, if this machine has it, then the one on the way to `server`, then all others,
    with the loopback address last."""
    first = []
    with contextlib.suppress(ConfigError):  # only executors have an interface of that name
        first += interface_addresses(interface) if interface else []
    with contextlib.suppress(OSError):  # only a proxy can resolve the server's name
        first.append(address_toward(server, 1))
    loopback, *others = own_addresses()
    return [each for each in dict.fromkeys([*first, *others, loopback]) if each in (loopback, *others)]


def reach(spark: SparkSession, addresses: Sequence[str], patience: timedelta) -> str | None:
    """Return the first of this machine's `addresses` that all tasks reach; None if there is none.

    Runs a Spark job of as many tasks as Spark's default parallelism. Blocks until it has ended; raises `ConfigError` if
    it has not, for lack of executors, within `patience`."""
    secret = new_secret()
    with ExitStack() as stack:
        listeners = {}
        for address in addresses:
            listener = listen(address)
            stack.callback(listener.close)
            listeners[join_address(address, listener.getsockname()[1])] = listener
        acceptor = Acceptor(list(listeners.values()), secret, me=b"driver", service="the search for an address")
        stack.enter_context(closing(AcceptingThread(acceptor, _hang_up, name="farandole-reach")))
        rows = spark.range(1 << 10).mapInArrow(functools.partial(_try_all, list(listeners), secret), _REACHED_SCHEMA)
        with _limited(spark, patience):
            tasks = [set(row["address"].split()) for row in rows.collect()]
        common = set.intersection(*tasks)
        return next((own for own, at in zip(addresses, listeners, strict=True) if at in common), None)


@contextmanager
def _limited(spark: SparkSession, patience: timedelta) -> Iterator[None]:
    """Cancel the Spark jobs of the block after `patience`; the block then raises `ConfigError`."""
    tag, expired, done = f"farandole-reach-{secrets.token_hex(4)}", threading.Event(), threading.Event()

    def expire() -> None:
        wait = patience.total_seconds()
        while not done.wait(wait):
            expired.set()
            try:
                spark.interruptTag(tag)
            except Exception as error:  # such as a short outage of the server
                log.warning("the search for an address of this machine cannot be cancelled yet (%s)", error)
            wait = INTERRUPT_EVERY  # the job may have reached the server only afterwards

    limit = threading.Thread(target=expire, name="farandole-limit", daemon=True)
    spark.addTag(tag)
    limit.start()
    try:
        yield
    except Exception as error:
        if not expired.is_set():
            raise
        problem = f"no executor has tried the addresses of this machine for {patience.total_seconds():g} s"
        raise ConfigError("start_timeout", f"{problem}; look at the executors of the Spark Connect server") from error
    finally:
        done.set()
        limit.join()
        spark.removeTag(tag)


def _hang_up(peer: Admitted) -> None:
    """Close a task's connection, whose handshake has shown that the task reaches this address."""
    peer.sock.close()


def _try_all(addresses: Sequence[str], secret: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the `addresses` that this task reaches, as one text; a function for `mapInArrow`."""
    for _ in batches:
        pass
    with ThreadPoolExecutor(len(addresses)) as pool:
        reached = list(pool.map(functools.partial(_reaches, secret), addresses))
    reachable = " ".join(address for address, there in zip(addresses, reached, strict=True) if there)
    yield pa.RecordBatch.from_pylist([{"address": reachable}], schema=_ARROW_REACHED)


def _reaches(secret: bytes, address: str) -> bool:
    try:
        connection, _ = dial(address, secret, me=b"task", deadline=Deadline(TRY_TIMEOUT))
    except (OSError, FarandoleError):
        return False
    connection.close()
    return True
