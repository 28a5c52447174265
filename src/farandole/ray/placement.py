"""Places of ranks in a Ray cluster: bundles of resources in a placement group, a new one or the calling task's."""

from dataclasses import dataclass
from datetime import timedelta

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)

from farandole.errors import ConfigError, SlotsTimeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The resources of all ranks. With `hosts`, each host runs `ranks` / `hosts` of them."""

    ranks: int
    hosts: int | None
    cpus: float
    gpus: float

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError("num_workers", f"must be >= 1, got {self.ranks}")
        if self.cpus < 0 or self.gpus < 0:
            raise ConfigError("cpus_per_worker", f"resources of a rank must be >= 0, got {self.cpus}, {self.gpus} GPUs")

    def resources(self, ranks: int = 1) -> dict[str, float]:
        """Return the resources of `ranks` ranks, as Ray names them."""
        return {name: ranks * each for name, each in (("CPU", self.cpus), ("GPU", self.gpus)) if each}

    def bundles(self) -> list[dict[str, float]]:
        """Return a bundle for each rank, or for each host if hosts were named."""
        if self.hosts is None:
            return [self.resources() for _ in range(self.ranks)]
        return [self.resources(self.ranks // self.hosts) for _ in range(self.hosts)]


@dataclass(frozen=True, slots=True)
class Places:
    """The placement group of the ranks, and the bundle of each; -1 stands for any bundle."""

    group: PlacementGroup
    bundles: list[int]
    own: bool  # made for the ranks, and removed with them

    def release(self) -> None:
        """Give the resources back, unless they are the caller's."""
        if self.own:
            remove_placement_group(self.group)


def reserve(demand: Demand, timeout: timedelta, *, use_current: bool) -> Places:
    """Return the places of all ranks: in the placement group of the calling task if there is one, else in a new one.

    Blocks until the cluster has the resources, up to `timeout`; then raises `SlotsTimeout`, a `SlotsError`. Raises
    `ConfigError` if a new group is needed for ranks without resources."""
    current = get_current_placement_group() if use_current else None
    if current is not None:
        return Places(current, [-1] * demand.ranks, own=False)
    if not demand.resources():
        raise ConfigError("cpus_per_worker", "is 0 without use_gpu, but Ray reserves no empty place; give more")
    bundles = demand.bundles()
    group = placement_group(bundles, strategy="PACK" if demand.hosts is None else "STRICT_SPREAD")
    places = [number for number in range(len(bundles)) for _ in range(demand.ranks // len(bundles))]
    try:
        if not group.wait(timeout.total_seconds()):
            each = " and ".join(f"{amount:g} {name}" for name, amount in bundles[0].items())
            hosts = "" if demand.hosts is None else f" on {demand.hosts} hosts, each with {each} free"
            free = _free_ranks(demand)
            where = f"the Ray cluster after {timeout.total_seconds():g} s (a rank takes {each}){hosts}"
            raise SlotsTimeout(demand.ranks, min(free, demand.ranks - 1), where)
    except BaseException:
        remove_placement_group(group)
        raise
    return Places(group, places, own=True)


def _free_ranks(demand: Demand) -> int:
    """Return the number of ranks for which the cluster has free resources, as if these were on one host."""
    free = ray.available_resources()
    return min(int(free.get(name, 0.0) // each) for name, each in demand.resources().items())
