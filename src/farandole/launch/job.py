"""All ranks of one run: started together, ended together, the first failure reported."""

import contextlib
import functools
import logging
import queue
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

from farandole.cores import share_of, threads_per_rank
from farandole.errors import ConfigError
from farandole.launch.backend import Agent, Assignment, Backend, Binding, OnLine, Rank, Task, check_binding
from farandole.launch.backends.local import LocalBackend
from farandole.launch.environment import wants_torch, warn_of_copies
from farandole.launch.events import next_event
from farandole.launch.failures import Failure, culprit
from farandole.launch.hosts import fill_slots
from farandole.launch.processes import GRACE
from farandole.limits import naming_process_limit
from farandole.meeting.addresses import join_address
from farandole.meeting.handshake import new_secret
from farandole.meeting.rendezvous import RendezvousServer
from farandole.other_launchers import note_launches
from farandole.topology import OF_ONE_PROCESS, TORCH_PLACES, JobEnvironment, Topology

log = logging.getLogger(__name__)

# Time for further failures after the first one: the rank that has caused it may be reported a moment later.
SETTLE = timedelta(seconds=1)
GONE = timedelta(seconds=20)  # for processes that survive SIGKILL


class Job:
    """The ranks of one run. `open_job` makes this object, and ends all ranks in any case."""

    def __init__(self, assignments: Sequence[tuple[Agent, Assignment]], departed: Callable[[int, str], None]) -> None:
        self.assignments = tuple(assignment for _, assignment in assignments)
        self._agents = tuple(agent for agent, _ in assignments)
        self._departed = departed
        self._ranks: list[Rank] = []
        self._ends: queue.SimpleQueue[Failure | None] = queue.SimpleQueue()

    def run(self, task: Task, on_line: OnLine) -> Failure | None:
        """Start all ranks with `task`; wait until all have ended well, or the first has failed.

        Returns the failure that caused the others, or None. After a failure other ranks may still run. Ctrl-C
        interrupts the wait."""
        for agent, assignment in zip(self._agents, self.assignments, strict=True):
            with naming_process_limit(functools.partial(ConfigError, "num_proc")):
                self._ranks.append(agent.start(assignment, task, on_line, self._end_of_rank))
        failures: list[Failure] = []
        settled: float | None = None
        for _ in self.assignments:
            try:
                failure = next_event(self._ends, settled)
            except queue.Empty:
                break
            if failure is not None:
                failures.append(failure)
                settled = settled or time.monotonic() + SETTLE.total_seconds()
                if failure.killed:
                    break
        return culprit(failures) if failures else None

    def values(self) -> list[bytes]:
        """Return the pickled values of a successful call, by rank."""
        return [rank.value() for rank in self._ranks]

    def stop(self, grace: timedelta = GRACE) -> None:
        """End all ranks, SIGTERM first, and wait until no process of them is left; a second Ctrl-C kills at once."""
        try:
            self._end(grace)
        except BaseException:
            self._end(timedelta(0))
            raise

    def _end_of_rank(self, rank: int, failure: Failure | None) -> None:
        """Note the end of `rank`, from any thread. The rendezvous need not know of a failure, which ends all ranks."""
        if failure is None:
            self._departed(rank, f"rank {rank} has ended and will not take part")
        self._ends.put(failure)

    def _end(self, grace: timedelta) -> None:
        for rank in self._ranks:
            rank.terminate(grace)
        for rank in self._ranks:
            if not rank.wait_gone(grace + GONE):
                log.error("rank %d survived SIGKILL; look for its processes in uninterruptible sleep", rank.rank)


@contextlib.contextmanager
def open_job(
    num_proc: int, environment: Mapping[str, str], *, backend: Backend | None = None, binding: Binding = "none"
) -> Iterator[Job]:
    """Prepare `num_proc` ranks on the hosts of `backend`: their secret, their rendezvous, their environments.

    Without a backend they run on this machine. When the context ends, so do all ranks and their descendants."""
    if num_proc < 1:
        raise ConfigError("num_proc", f"must be >= 1, got {num_proc}")
    check_binding(binding)
    warn_of_copies(environment)
    backend = LocalBackend(num_proc) if backend is None else backend
    hosts = fill_slots(backend.hosts, num_proc)
    secret, name = new_secret(), secrets.token_hex(4)
    with contextlib.ExitStack() as stack:
        agents = stack.enter_context(backend.open_agents(list(dict.fromkeys(hosts))))
        with naming_process_limit(functools.partial(ConfigError, "num_proc")):
            server = stack.enter_context(RendezvousServer(num_proc, secret, host=backend.address))
        identities = [agents[host].identity for host in hosts]
        threads = {
            host: _threads(agent, identities.count(agent.identity), environment) for host, agent in agents.items()
        }
        torch_store = join_address(agents[hosts[0]].address, agents[hosts[0]].reserve_port())
        torch_env = wants_torch(environment)
        foreign = OF_ONE_PROCESS if torch_env else OF_ONE_PROCESS.union(TORCH_PLACES)
        inherited = {name: value for name, value in environment.items() if name not in foreign}
        assignments = []
        for topology, host in zip(Topology.all_from_hosts(identities), hosts, strict=True):
            job_environment = JobEnvironment.of(
                topology,
                host=host.name,
                rendezvous=server.address,
                secret=secret,
                job=name,
                torch_store=torch_store,
            )
            cores = share_of(topology.local_rank, topology.local_size, agents[host].cores) if binding == "cores" else ()
            env = {"PYTHONUNBUFFERED": "1", **inherited, **threads[host], **note_launches(environment)}
            env.update(job_environment.write(torch_env=torch_env))
            assignments.append((agents[host], Assignment(rank=topology.rank, host=host, env=env, cores=cores)))
        where = ", ".join(host.name for host in agents)
        log.info("job %s: %d ranks on %s, rendezvous at %s", name, num_proc, where, server.address)
        job = Job(assignments, server.depart)
        stack.callback(job.stop)
        yield job


def _threads(agent: Agent, ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return OMP_NUM_THREADS for each rank: by default each would start a thread per core, and compete for cores."""
    if "OMP_NUM_THREADS" in environment:
        return {}
    threads = threads_per_rank(agent.usable_cores, ranks)
    log.info(
        "OMP_NUM_THREADS=%d for each rank (%d cores, %d ranks); set it yourself to override this",
        threads,
        agent.usable_cores,
        ranks,
    )
    return {"OMP_NUM_THREADS": str(threads)}
