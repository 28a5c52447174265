"""Context of one rank: its topology, configuration and engine."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from farandole._native import RankEngines
from farandole.config import Config
from farandole.core.monitoring.monitors import Monitors, warn_of_idle
from farandole.core.monitoring.stopped import watched_processes
from farandole.core.monitoring.timeline import Timeline
from farandole.core.process_sets.agreement import Sets
from farandole.core.wiring.connect import connect
from farandole.core.wiring.start import first_knobs, start_engine
from farandole.errors import RendezvousError
from farandole.limits import naming_process_limit
from farandole.log_level import show_messages
from farandole.meeting.rendezvous import Rendezvous
from farandole.topology import Topology, host_identity


class Context:
    """One rank's membership in a job. One process can hold the contexts of several ranks, one per thread.

    The constructor blocks until every rank has reached `rendezvous`, up to `config.start_timeout`, and starts one
    native thread. It raises `RendezvousError` with the missing ranks. `host` overrides the identity of this host; ranks
    with different identities use sockets between them. If the ranks are only some ranks of a larger job, `members` are
    their ranks in that job, and `process_set` is the name of the set; error messages use both. With `transfers`, on all
    ranks, the engine can also send messages between two ranks, over a connection of each pair of ranks."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        config: Config | None = None,
        *,
        host: str | None = None,
        members: Sequence[int] = (),
        process_set: str = "",
        transfers: bool = False,
    ) -> None:
        self.config = Config.from_environment() if config is None else config
        show_messages(self.config)
        self.rendezvous = rendezvous
        self._process = os.getpid()
        here = host_identity() if host is None else host
        with ExitStack() as failing, naming_process_limit(RendezvousError):
            # Open the files first, so that an unwritable path is reported before anything starts.
            generation = 0 if members else rendezvous.generation
            self._monitors = Monitors(rendezvous.rank, rendezvous.size, here, self.config, generation)
            failing.callback(self._monitors.close)
            if rendezvous.rank == 0 and not members:
                warn_of_idle(self.config)  # once in a job
            connections = connect(rendezvous, self.config, host=here, transfers=transfers)
            self.topology: Topology = connections.topology
            # A single rank has no use for the fabric that it has asked for.
            self.fabric = connections.fabric_name or self.config.fabric
            processes = {} if members else watched_processes(self.topology, connections.companions)
            self.engine = start_engine(connections, self.config, members=members, process_set=process_set)
            self._engines = RankEngines(self.local_rank, self.local_size)
            self._engines.add((), self.engine)
            self.sets = Sets(rendezvous, self.config, self.topology, self.engine, self._monitors, self._engines)
            failing.callback(self.shutdown)  # else the other ranks would wait for the engine
            self._monitors.follow(self.engine, self.rank)
            self._monitors.watch(processes)
            knobs = first_knobs(connections, self.config)
            self._monitors.tune(self.engine, self.topology, knobs, connections.segment.slot_bytes)
            failing.pop_all()

    @property
    def timeline(self) -> Timeline:
        return self._monitors.timeline

    def metrics(self) -> dict[str, float]:
        """Return the counters of this rank in all its process sets; `Metrics.read` describes each one."""
        return self._monitors.metrics.read()

    @property
    def rank_id(self) -> int:
        """The number by which traced graphs find this rank."""
        return self._engines.number

    @property
    def rank(self) -> int:
        return self.topology.rank

    @property
    def size(self) -> int:
        return self.topology.size

    @property
    def local_rank(self) -> int:
        given = self.rendezvous.local_rank
        return self.topology.local_rank if given is None else given

    @property
    def local_size(self) -> int:
        return self.topology.local_size

    @property
    def cross_rank(self) -> int:
        return self.topology.cross_rank

    @property
    def cross_size(self) -> int:
        return self.topology.cross_size

    @property
    def is_homogeneous(self) -> bool:
        return self.topology.is_homogeneous

    def empty_shared(self, nbytes: int) -> object:
        """Return `nbytes` of uninitialized memory that the other ranks of this host can read, for DLPack.

        An in-place allreduce copies nothing if every rank uses such memory. The memory is freed with its last view,
        also after `shutdown`. Across several hosts it is ordinary memory. Raises `InvalidRequest` if this rank's part
        of the arena is exhausted."""
        return self.engine.shared_buffer(nbytes)

    def shutdown(self) -> None:
        """Leave the job and its process sets. Operations in flight fail, here and on the other ranks. Idempotent.

        Does nothing in a forked child: the engine, its peers and the timeline are the parent's."""
        if os.getpid() != self._process:
            return
        self._monitors.quiet()
        self._engines.close()
        self.sets.shutdown()
        self.engine.shutdown()
        self._monitors.close()
        self.rendezvous.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
