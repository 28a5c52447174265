"""`env://` of torch.distributed for ranks whose launcher sets no variables of torchrun."""

import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeAlias
from urllib.parse import parse_qsl, urlsplit

from torch._C._distributed_c10d import Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers, rendezvous

from farandole.topology import JobEnvironment, is_member_without_torch

Found: TypeAlias = tuple[Store, int, int]  # torch's store, rank, size


def find_stores_of_jobs() -> None:
    """Let `init_process_group` find the store, rank and size of a farandole job. May be called again.

    Where MASTER_ADDR is set, and outside of jobs, torch reads its own variables as before."""
    handler = _rendezvous_handlers["env"]
    if not isinstance(handler, functools.partial):  # torch registers a scheme once, and offers no way to replace it
        _rendezvous_handlers["env"] = functools.partial(find_store, handler)


def find_store(
    torchs: Callable[..., Iterator[Found]], url: str, timeout: timedelta = default_pg_timeout, **options: object
) -> Iterator[Found]:
    """Return torch's store of the job, the rank and the size, or what torch's own handler of `url` returns."""
    job = JobEnvironment.without_torch()
    if job is None and is_member_without_torch():
        # Imported here, because most jobs are not elastic, and others' backends come here, too.
        from farandole.torch.distributed.generation import find_generation_store

        return iter([find_generation_store(timeout)])
    if job is None:
        return torchs(url, timeout=timeout, **options)
    asked = dict(parse_qsl(urlsplit(url).query))
    rank, size = int(asked.get("rank", job.rank)), int(asked.get("world_size", job.size))
    found: Iterator[Found] = rendezvous(f"tcp://{job.torch_store}", rank, size, timeout=timeout)
    return found
