"""Registration of the backend, and creation of process groups."""

from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from farandole.config import Config
from farandole.core import default
from farandole.errors import ConfigError
from farandole.meeting.rendezvous import Rendezvous
from farandole.topology import JobEnvironment
from farandole.torch.distributed.generation import blaming_lost_ranks
from farandole.torch.distributed.group import FarandoleGroup
from farandole.torch.distributed.store import StoreRendezvous
from farandole.torch_env import find_stores_of_jobs

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

__all__ = ["arguments_of", "make_group", "register"]


def register() -> None:
    """Register the backend "farandole" for tensors of CPU and CUDA with `init_process_group`. May be called again."""
    dist.Backend.register_backend("farandole", make_group, extended_api=True, devices=["cpu", "cuda"])
    find_stores_of_jobs()


class _Arguments(TypedDict):
    """Arguments of `FarandoleGroup`."""

    rendezvous: Rendezvous
    config: Config
    name: str
    members: list[int]
    label: str


def make_group(asked: "_DistributedBackendOptions", options: object = None) -> FarandoleGroup:
    """Return the group that torch asks for; blocks and raises like `arguments_of`."""
    with blaming_lost_ranks():
        return FarandoleGroup(**arguments_of(asked, options))


def arguments_of(asked: "_DistributedBackendOptions", options: object = None) -> _Arguments:
    """Meet the other ranks at torch's store; `options` may be a `farandole.Config`.

    torch's timeout applies to the start and to every collective, unless it is torch's default and a setting differs.
    Blocks until all ranks have arrived; raises `RendezvousError` naming the missing ones."""
    if not isinstance(options, Config | None):
        raise ConfigError("pg_options", f"must be a farandole.Config, got {type(options).__name__}")
    config = Config.from_environment() if options is None else options
    usual = Config()
    chosen = asked.timeout != default_pg_timeout
    if chosen or config.collective_timeout == usual.collective_timeout:
        config = replace(config, collective_timeout=asked.timeout)
    if chosen or config.start_timeout == usual.start_timeout:
        config = replace(config, start_timeout=asked.timeout)
    members = list(asked.global_ranks_in_group)
    if members:
        # The files belong to the group of all ranks, and only that one is tuned.
        config = replace(config, timeline=None, autotune=False)
    job, generation = JobEnvironment.read(), default.context() if default.is_elastic() else None
    secret = None if job is None else job.secret
    rendezvous = StoreRendezvous(
        asked.store,
        asked.group_rank,
        asked.group_size,
        secret=secret if generation is None else generation.rendezvous.secret,
        timeout=config.start_timeout,
        require_alive=None if generation is None else generation.engine.require_alive,
    )
    label = f"process group {asked.group_id}" if members else ""
    return {"rendezvous": rendezvous, "config": config, "name": asked.group_id, "members": members, "label": label}
