"""One rank: its place among the others, its configuration, its engine."""

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from farandole._native import RankEngines
from farandole.config import Config
from farandole.core.monitoring.monitors import Monitors, warn_of_idle
from farandole.core.monitoring.timeline import Timeline
from farandole.core.process_sets.agreement import Sets
from farandole.core.process_sets.registry import GLOBAL
from farandole.core.wiring.connect import connect
from farandole.core.wiring.start import start_engine
from farandole.errors import RendezvousError
from farandole.limits import naming_process_limit
from farandole.log_level import show_messages
from farandole.rendezvous import Rendezvous
from farandole.topology import Topology, host_identity

__all__ = ["Context"]


class Context:
    """A rank that has met the others. Several can live in one process, as threads.

    Making one blocks until every rank has come to `rendezvous`, up to `config.start_timeout`, and starts one native
    thread. Raises `RendezvousError` naming who is missing. `host` overrides the identity of this host; ranks with
    different identities talk over sockets. When these are only some ranks of a larger job, `members` are their numbers
    in it and `process_set` is what people call them: errors speak of the ranks so."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        config: Config | None = None,
        *,
        host: str | None = None,
        members: Sequence[int] = (),
        process_set: str = "",
    ) -> None:
        self.config = Config.from_environment() if config is None else config
        show_messages(self.config)
        self._rendezvous = rendezvous
        self._process = os.getpid()
        # Opened before anything else starts: a path that cannot be written is the user's slip.
        here = host_identity() if host is None else host
        self._monitors = Monitors(rendezvous.rank, rendezvous.size, here, self.config)
        if rendezvous.rank == 0 and not members:
            warn_of_idle(self.config)  # once in a job
        try:
            with naming_process_limit(RendezvousError):
                wiring = connect(rendezvous, self.config, host=here)
                self.topology: Topology = wiring.topology
                self.is_over_mpi = wiring.mpi is not None or self.config.fabric == "mpi"
                self.engine = start_engine(wiring, self.config, members=members, process_set=process_set)
        except BaseException:
            self._monitors.close()
            raise
        self._monitors.follow(self.engine, self.rank)
        self._engines = RankEngines(self.topology.local_rank, self.topology.local_size)
        self._engines.add(GLOBAL, self.engine)
        self.sets = Sets(rendezvous, self.config, self.topology, self.engine, self._monitors, self._engines)
        self._monitors.tune(self.engine, self.topology, wiring.segment.slot_bytes)

    @property
    def timeline(self) -> Timeline:
        return self._monitors.timeline

    def metrics(self) -> dict[str, float]:
        """Return what this rank has done so far, in all its process sets: `Metrics.read` says what each number is."""
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
        return self.topology.local_rank

    @property
    def local_size(self) -> int:
        return self.topology.local_size

    @property
    def cross_rank(self) -> int:
        return self.topology.cross_rank

    @property
    def cross_size(self) -> int:
        return self.topology.cross_size

    def empty_shared(self, nbytes: int) -> object:
        """Return `nbytes` of uninitialized memory that the other ranks of this host can reach, for DLPack.

        An allreduce in place of such memory on every rank copies nothing. It goes back when the last view of it dies,
        also after `shutdown`. Across several hosts it is ordinary memory. Raises `InvalidRequest` when this rank's room
        for it is exhausted."""
        return self.engine.shared_buffer(nbytes)

    def shutdown(self) -> None:
        """Leave the job and its process sets; operations in flight fail, here and on the other ranks. Idempotent.

        Does nothing in a forked child: the engine, its peers and the timeline are the parent's."""
        if os.getpid() != self._process:
            return
        self._monitors.quiet()
        self._engines.close()
        self.sets.shutdown()
        self.engine.shutdown()
        self._monitors.close()
        self._rendezvous.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
