"""All ranks of one run on this machine: started together, ended together, the first failure reported."""

import contextlib
import logging
import os
import queue
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol, TypeAlias

from farandole.errors import ConfigError
from farandole.handshake import new_secret, split_address
from farandole.launch.cores import available_cores, share_of, threads_per_rank
from farandole.launch.failures import Failure, culprit, exit_failure
from farandole.launch.processes import GRACE, OnLine, RankProcess
from farandole.launch.reserved import ReservedPort
from farandole.other_launchers import find_other_launch
from farandole.rendezvous import RendezvousServer
from farandole.topology import JobEnvironment

__all__ = ["Binding", "Job", "Place", "open_job", "run_command"]

log = logging.getLogger(__name__)

Binding: TypeAlias = Literal["none", "cores"]

# How long other ranks may still fail after the first did: the guilty one may come second by a hair.
SETTLE = timedelta(seconds=1)
GONE = timedelta(seconds=20)  # for what is left after SIGKILL


class Rank(Protocol):
    """What a job knows of its ranks; `RankProcess` and `RankCall` are such."""

    rank: int

    def terminate(self, grace: timedelta) -> None: ...

    def wait_gone(self, timeout: timedelta) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one rank runs: its number, its environment, its cores (none: all)."""

    rank: int
    env: Mapping[str, str]
    cores: tuple[int, ...]


class Job:
    """The ranks of one run; made by `open_job`, which ends them all whatever happens."""

    def __init__(self, places: Sequence[Place], departed: Callable[[int, str], None]) -> None:
        self.places = tuple(places)
        self._departed = departed
        self._ranks: list[Rank] = []
        self._ends: queue.SimpleQueue[tuple[int, Failure | None]] = queue.SimpleQueue()

    def start(self, launch: Callable[[Place], Rank]) -> None:
        """Start all ranks with `launch`, which must see to it that `ended` is called once for each."""
        for place in self.places:
            self._ranks.append(launch(place))

    def ended(self, rank: int, failure: Failure | None) -> None:
        """Take note that `rank` has ended, well if `failure` is None; from any thread.

        Ranks that still wait to meet one that has ended well hear so; after a failure all are ended anyway."""
        if failure is None:
            self._departed(rank, f"rank {rank} has ended and will not take part")
        self._ends.put((rank, failure))

    def wait(self) -> Failure | None:
        """Wait for all ranks to end well, or for the first to fail: gives the failure that brought the others.

        Other ranks may still run when it returns a failure; Ctrl-C interrupts it."""
        failures: list[Failure] = []
        settled: float | None = None
        for _ in self.places:
            try:
                _, failure = self._ends.get(timeout=None if settled is None else max(0.0, settled - time.monotonic()))
            except queue.Empty:
                break
            if failure is not None:
                failures.append(failure)
                settled = settled or time.monotonic() + SETTLE.total_seconds()
                if failure.killed:
                    break
        return culprit(failures) if failures else None

    def stop(self, grace: timedelta = GRACE) -> None:
        """End all ranks, SIGTERM first, and wait until nothing of them is left; a second Ctrl-C kills at once."""
        try:
            self._end(grace)
        except BaseException:
            self._end(timedelta(0))
            raise

    def _end(self, grace: timedelta) -> None:
        for rank in self._ranks:
            rank.terminate(grace)
        for rank in self._ranks:
            if not rank.wait_gone(grace + GONE):
                log.error("rank %d does not end, not even when killed; something of it is still there", rank.rank)


@contextlib.contextmanager
def open_job(num_proc: int, environment: Mapping[str, str], *, binding: Binding = "none") -> Iterator[Job]:
    """Prepare `num_proc` ranks on this machine: their secret, their meeting point, their environments.

    On leaving, however that comes about, all ranks are ended and none of their descendants is left."""
    if num_proc < 1:
        raise ConfigError("num_proc", f"must be >= 1, got {num_proc}")
    _warn_of_copies(environment)
    secret = new_secret()
    base = {**environment, **_threads(num_proc, environment)}
    base.setdefault("PYTHONUNBUFFERED", "1")
    cores = sorted(os.sched_getaffinity(0))
    with RendezvousServer(num_proc, secret) as server, ReservedPort() as torch_port:
        name = secrets.token_hex(4)
        job = Job(
            [
                Place(
                    rank=rank,
                    env={**base, **_variables(rank, num_proc, server.address, secret, name, torch_port.port)},
                    cores=share_of(rank, num_proc, cores) if binding == "cores" else (),
                )
                for rank in range(num_proc)
            ],
            server.depart,
        )
        log.info("job %s: %d ranks on this machine, rendezvous at %s", name, num_proc, server.address)
        try:
            yield job
        finally:
            job.stop()


def run_command(
    command: Sequence[str],
    num_proc: int,
    *,
    environment: Mapping[str, str],
    on_line: OnLine,
    binding: Binding = "none",
) -> Failure | None:
    """Run `command` as every rank, wait for all of them, and give the first failure, if any; nothing is left then."""
    with open_job(num_proc, environment, binding=binding) as job:

        def ended(process: RankProcess) -> None:
            exit = process.exit
            assert exit is not None
            job.ended(process.rank, exit_failure(exit, process.tail) if exit.code else None)

        job.start(
            lambda place: RankProcess.start(
                command, place.env, rank=place.rank, on_line=on_line, cores=place.cores, on_exit=ended
            )
        )
        return job.wait()


def _warn_of_copies(environment: Mapping[str, str]) -> None:
    """Warn when another launcher started several copies of this one; a rank may well start a job of its own."""
    found = None if "FARANDOLE_RANK" in environment else find_other_launch(environment)
    if found is not None:
        log.warning("%s; each of them starts a job of its own, unconnected to the others", found)


def _variables(rank: int, size: int, rendezvous: str, secret: bytes, job: str, torch_port: int) -> dict[str, str]:
    return JobEnvironment(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        cross_rank=0,
        cross_size=1,
        rendezvous=rendezvous,
        secret=secret,
        job=job,
    ).write(torch_store=(split_address(rendezvous)[0], torch_port))


def _threads(num_proc: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Without this every rank would run as many threads as there are cores, and they would fight for them."""
    if "OMP_NUM_THREADS" in environment:
        return {}
    cores = available_cores()
    threads = threads_per_rank(cores, num_proc)
    log.info(
        "OMP_NUM_THREADS=%d for each rank (%d cores, %d ranks); set it yourself to have it otherwise",
        threads,
        cores,
        num_proc,
    )
    return {"OMP_NUM_THREADS": str(threads)}
