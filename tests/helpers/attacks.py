"""Attacks on the start of a job, with the seconds that they add and the faults that they cause."""

import os
import signal
import statistics
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from socket import socket

import numpy as np
from namespaces import problem

from farandole.config import Config
from farandole.core.context import Context
from farandole.core.operations.kinds import ALLREDUCE
from farandole.core.wiring import connect as connecting
from farandole.core.wiring.peers import Arrivals
from farandole.errors import FarandoleError, RendezvousError
from farandole.meeting.addresses import join_address
from farandole.meeting.handshake import new_secret
from farandole.meeting.rendezvous import Rendezvous, RendezvousServer, TcpRendezvous, from_environment
from helpers.hosts import run_on_hosts
from helpers.outcomes import RanksFailed
from helpers.ranks import run_ranks
from helpers.recurring import recurring
from helpers.strangers import crowd


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of an attack: median seconds over the rounds without and with it, and faults."""

    attack: str
    strangers: int
    rounds: int
    alone: float
    attacked: float
    faults: int  # rounds in which the job failed, or its result was wrong
    skipped: str = ""  # why the attack was not tried

    @property
    def added(self) -> float:
        """Return the seconds that the attack added."""
        return max(0.0, self.attacked - self.alone)


def starts_among_strangers(outer: Context, strangers: int, hosts: Collection[str]) -> tuple[float, float, float]:
    """Start a context among strangers; return the times of the crowd and of the start, and a sum over all ranks."""
    outer.shutdown()
    began = 0.0
    with ExitStack() as stack:

        class Besieged(Arrivals):
            def __init__(self, listeners: Collection[socket], rendezvous: Rendezvous) -> None:
                nonlocal began
                super().__init__(listeners, rendezvous)
                tcp, unix = listeners
                if strangers:
                    addresses = [join_address(*tcp.getsockname()[:2]), unix.getsockname().hex()]
                    stack.enter_context(crowd(addresses, strangers))
                began = time.monotonic()

        connecting.Arrivals = Besieged  # type: ignore[attr-defined]
        name = list(hosts)[outer.rank]
        with Context(from_environment(), Config(), host=f"host {name}") as context:
            started = time.monotonic()
            values = np.ones(1000, np.float32)
            context.engine.run(recurring(ALLREDUCE), "x", values, values)
            return began, started, float(values.sum())


def _started(found: list[object]) -> float:
    """Return the seconds from the last rank's crowd to the last rank's start; raise `RanksFailed` for a wrong sum."""
    times: list[tuple[float, float, float]] = found  # type: ignore[assignment]
    if any(total != 1000.0 * len(times) for *_, total in times):
        raise RanksFailed(len(times), [])
    return max(started for _, started, _ in times) - max(began for began, *_ in times)


def ranks_on_hosts(placement: str, strangers: int) -> float:
    """Return the seconds that ranks need to start; `placement` has a letter for each rank's host."""
    return _started(run_ranks(len(placement), starts_among_strangers, strangers, placement, how="processes"))


def ranks_in_namespaces(placement: str, strangers: int) -> float:
    """Return the seconds that ranks need to start if hosts are network namespaces."""
    return _started(run_on_hosts(placement, starts_among_strangers, strangers, placement))


def rendezvous(strangers: int) -> float:
    """Return the seconds of the rendezvous of four ranks."""
    secret = new_secret()
    with RendezvousServer(4, secret) as server, ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        if strangers:
            stack.enter_context(crowd([server.address], strangers))
        ranks = [TcpRendezvous(server.address, rank, 4, secret) for rank in range(4)]
        began = time.monotonic()
        timeout = timedelta(seconds=30)
        met = list(pool.map(lambda each: each.allgather(b"%d" % each.rank, timeout=timeout), ranks))
        assert met == [[b"0", b"1", b"2", b"3"]] * 4
        return time.monotonic() - began


def dies_before_it_connects(outer: Context, victim: int, placement: str) -> tuple[tuple[int, ...], float, float]:
    """Return the missing ranks, and the times of begin and error. The victim kills itself after the rendezvous."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    outer.shutdown()
    if outer.rank == victim:
        connecting._Connector._share_segment = die  # type: ignore[assignment, method-assign]
    began = time.monotonic()
    try:
        Context(from_environment(), Config(start_timeout=timedelta(seconds=20)), host=placement[outer.rank])
    except RendezvousError as error:
        return error.missing, began, time.monotonic()
    raise AssertionError("nobody was missed")


def death_in_init(placement: str, victim: int) -> float:
    """Return the seconds until all survivors name a rank that was killed after the rendezvous."""
    size = len(placement)
    found = run_ranks(size, dies_before_it_connects, victim, placement, how="processes", dies=[victim])
    survivors: list[tuple[tuple[int, ...], float, float]] = found[:victim] + found[victim + 1 :]
    if any(missing != (victim,) for missing, *_ in survivors):
        raise RanksFailed(size, [])
    return max(failed for *_, failed in survivors) - max(began for _, began, _ in survivors)


def _measured(attack: str, strangers: int, rounds: int, run: Callable[[int], float]) -> Finding:
    """Measure `run(strangers)` without and with strangers, in turns."""
    alone: list[float] = []
    attacked: list[float] = []
    faults = 0
    for _ in range(rounds):
        alone.append(run(0))
        try:
            attacked.append(run(strangers))
        except (FarandoleError, RanksFailed, AssertionError):
            faults += 1
    return Finding(
        attack=attack,
        strangers=strangers,
        rounds=rounds,
        alone=statistics.median(alone),
        attacked=statistics.median(attacked or [float("inf")]),
        faults=faults,
    )


def _skipped(attack: str, why: str) -> Finding:
    return Finding(attack=attack, strangers=0, rounds=0, alone=0.0, attacked=0.0, faults=0, skipped=why)


def _between_namespaces(strangers: int, rounds: int) -> Finding:
    name = "ranks, between hosts"
    if problem():
        return _skipped(name, problem())
    return _measured(name, strangers, rounds, lambda count: ranks_in_namespaces("AB", count))


def _of_spark(attack: str, strangers: int, rounds: int) -> Finding:
    try:
        from helpers import spark_attacks
    except ImportError as error:
        return _skipped(attack, str(error))
    run = {"Spark's driver log": spark_attacks.lines_arrive, "Spark's keeper of rows": spark_attacks.rows_are_kept}
    return _measured(attack, strangers, rounds, run[attack])


def _death_of_keeper(strangers: int, rounds: int) -> Finding:
    """Measure until the driver notices a keeper's death, in both columns: no strangers take part."""
    name = "kill -9 of a keeper"
    try:
        from helpers.spark_attacks import death_of_keeper
    except ImportError as error:
        return _skipped(name, str(error))
    return _measured(name, 0, rounds, lambda _: death_of_keeper())


def _death(strangers: int, rounds: int) -> Finding:
    """Measure until all survivors name a dead rank, in both columns: no strangers take part."""
    return _measured("kill -9 in init, 3 ranks", 0, rounds, lambda _: death_in_init("AAA", 2))


# Attacks by name; their arguments are the numbers of strangers and of rounds.
ATTACKS: dict[str, Callable[[int, int], Finding]] = {
    "ranks": lambda count, rounds: _measured("ranks, one host", count, rounds, lambda n: ranks_on_hosts("AA", n)),
    "hosts": _between_namespaces,
    "rendezvous": lambda count, rounds: _measured("rendezvous", count, rounds, rendezvous),  # Spark uses it too
    "driver-log": lambda count, rounds: _of_spark("Spark's driver log", count, rounds),
    "keeper": lambda count, rounds: _of_spark("Spark's keeper of rows", count, rounds),
    "task-channel": lambda *_: _skipped("Spark's task channel", "a pair of sockets, to which nobody can connect"),
    "death": _death,
    "keeper-death": _death_of_keeper,
}
