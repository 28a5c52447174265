"""What torch.distributed calls to make a process group."""

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from farandole.config import Config
from farandole.errors import ConfigError
from farandole.topology import JobEnvironment
from farandole.torch.distributed.group import FarandoleGroup
from farandole.torch.distributed.store import StoreRendezvous

__all__ = ["make_group", "register"]


def register() -> None:
    """Let `init_process_group` know the backend "farandole", for tensors of the CPU. May be called again."""
    dist.Backend.register_backend("farandole", make_group, extended_api=True, devices=["cpu"])


def make_group(asked: Any, options: object = None) -> FarandoleGroup:
    """Meet the other ranks at the store that torch gives; `options` may be a `farandole.Config`.

    torch's timeout is for the start and for every collective, unless it is torch's default and a setting says
    otherwise. Blocks until all ranks have come; raises `RendezvousError` naming who did not."""
    if not isinstance(options, Config | None):
        raise ConfigError("pg_options", f"must be a farandole.Config, got {type(options).__name__}")
    config = Config.from_environment() if options is None else options
    default = Config()
    for each in ("collective_timeout", "start_timeout"):
        if asked.timeout != default_pg_timeout or getattr(config, each) == getattr(default, each):
            config = replace(config, **{each: asked.timeout})
    members = list(asked.global_ranks_in_group)
    if members:
        # The files are those of the group of all ranks, and it alone is tuned.
        config = replace(config, timeline=None, autotune=False)
    job = JobEnvironment.read()
    rendezvous = StoreRendezvous(
        asked.store,
        asked.group_rank,
        asked.group_size,
        secret=None if job is None else job.secret,
        timeout=config.start_timeout,
    )
    label = f"process group {asked.group_id}" if members else ""
    return FarandoleGroup(rendezvous, config, name=asked.group_id, members=members, label=label)
