"""Start of an engine over its connections."""

from collections.abc import Sequence
from dataclasses import replace

from farandole._native import Engine
from farandole.config import Config
from farandole.core.autotune.knobs import Knobs
from farandole.core.wiring.connections import Connections
from farandole.core.wiring.gpus import find_nccl, kinds_by_route, may_share_gpu


def first_knobs(connections: Connections, config: Config) -> Knobs:
    """Return the knobs with which an engine over these connections starts."""
    return replace(Knobs.of(config), slot_bytes=connections.chunk)


def start_engine(
    connections: Connections, config: Config, *, members: Sequence[int] = (), process_set: str = ""
) -> Engine:
    """Start this rank's engine, which has a native thread of its own.

    For a process set, `members` are its ranks' numbers in the job, and `process_set` is its name; errors use both.
    Blocks until the engines of all ranks of this host run."""
    engine = None
    try:
        engine = Engine(
            rank=connections.topology.rank,
            size=connections.topology.size,
            local_ranks=list(connections.topology.local_ranks),
            segment=connections.segment,
            cores=connections.cores,
            remotes=connections.remotes,
            parents=connections.topology.control_parents,
            hosts=connections.topology.host_numbers,
            knobs=first_knobs(connections, config).for_engine(),
            cache_capacity=config.cache_capacity,
            spin=config.spin.total_seconds(),
            timeout=config.patience_seconds,
            heartbeat=config.heartbeat.total_seconds(),
            stall=config.stall_seconds,
            members=list(members),
            process_set=process_set,
            fabric=connections.fabric,
            nccl_files=find_nccl(),
            through_host=kinds_by_route(config, "host"),
            by_nccl=kinds_by_route(config, "nccl"),
            may_share_gpu=may_share_gpu(),
        )
        connections.settle()
    except BaseException as error:
        connections.abandon(error)
        if engine is not None:
            engine.shutdown()
        raise
    return engine
