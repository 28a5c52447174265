"""Start of an engine from its wiring."""

from collections.abc import Sequence

from farandole._native import Engine
from farandole.config import Config
from farandole.core.autotune.knobs import Knobs
from farandole.core.wiring.connect import Wiring
from farandole.core.wiring.gpus import find_nccl, kinds_by_route

__all__ = ["start_engine"]


def start_engine(wiring: Wiring, config: Config, *, members: Sequence[int] = (), process_set: str = "") -> Engine:
    """Start this rank's engine, which has a native thread of its own.

    For a process set, `members` are its ranks' numbers in the job, and `process_set` is its name; errors use both.
    Blocks until the engines of all ranks of this host run."""
    engine = None
    try:
        engine = Engine(
            rank=wiring.topology.rank,
            size=wiring.topology.size,
            local_ranks=list(wiring.topology.local_ranks),
            segment=wiring.segment,
            remotes=wiring.remotes,
            parents=wiring.topology.control_parents,
            hosts=wiring.topology.host_numbers,
            knobs=Knobs.of(config).for_engine(),
            cache_capacity=config.cache_capacity,
            spin=config.spin.total_seconds(),
            timeout=config.patience_seconds,
            heartbeat=config.heartbeat.total_seconds(),
            stall=config.stall_seconds,
            members=list(members),
            process_set=process_set,
            mpi=wiring.mpi,
            nccl_files=find_nccl(),
            through_host=kinds_by_route(config, "host"),
            by_nccl=kinds_by_route(config, "nccl"),
        )
        wiring.settle()
    except BaseException as error:
        wiring.abandon(error)
        if engine is not None:
            engine.shutdown()
        raise
    return engine
