"""Executor of functions on ranks that are actors of a Ray cluster."""

import logging
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError, UnserializableException
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from farandole.errors import ConfigError, RendezvousError
from farandole.launch.environment import wants_torch
from farandole.launch.failures import Failure, culprit, is_consequence
from farandole.launch.pickling import dump
from farandole.meeting.addresses import join_address, split_address
from farandole.ray.placement import Demand, Places, reserve
from farandole.ray.worker import RankActor
from farandole.topology import JobEnvironment, Topology, host_name

log = logging.getLogger(__name__)

T = TypeVar("T")

SETTLE = 1.0  # seconds to wait for further failures after the first, which may be a consequence of another one
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Time limits of an executor's start, and the network by which ranks connect."""

    start_timeout: timedelta = timedelta(seconds=120)
    placement_group_timeout: timedelta = timedelta(seconds=100)
    interface: str | None = None


class RayExecutor:
    """Ranks that are actors, one Ray worker process each, from `start` to `shutdown`.

    Ranks of one host have successive numbers. When a call fails on a rank, all ranks are ended, because others may wait
    for that rank, and its `RankFailed` is raised with the rank's own exception as the cause. Ctrl-C ends all ranks as
    well. `start` then starts new ones."""

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 120,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Sequence[str] | None = None,
    ) -> Settings:
        """Return settings, given times in seconds and the names of network interfaces. Ray needs no ssh.

        Each host uses the first of `nics` that it has and that connects."""
        if ssh_identity_file is not None or ssh_str is not None:
            log.warning("ssh_identity_file and ssh_str have no effect: Ray starts the ranks")
        names = nics if nics is None or isinstance(nics, str) else ",".join(nics)
        return Settings(
            start_timeout=timedelta(seconds=timeout_s),
            placement_group_timeout=timedelta(seconds=placement_group_timeout_s),
            interface=names or None,
        )

    def __init__(
        self,
        settings: Settings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        """Plan `num_workers` ranks on any hosts, or `num_workers_per_host` on each of `num_hosts` hosts; start none.

        The arguments from `min_workers` on are those of Horovod's elastic mode; values that ask for it raise
        `ConfigError`."""
        if min_workers is not None and num_workers is not None:
            raise ValueError("Both `min_workers` and `num_workers` provided.")
        elastic = {"min_workers": min_workers, "max_workers": max_workers}
        for name, value in (elastic | {"reset_limit": reset_limit, "cooldown_range": cooldown_range}).items():
            if value is not None:
                raise ConfigError(name, "these ranks are not elastic; give num_workers, or use ElasticRayExecutor")
        if (num_workers is None) == (num_hosts is None):
            raise ConfigError("num_workers", "give num_workers, or num_hosts with num_workers_per_host")
        if gpus_per_worker is not None and not use_gpu:
            raise ConfigError("gpus_per_worker", "needs use_gpu=True")
        if gpus_per_worker is not None and gpus_per_worker <= 0:
            raise ConfigError("gpus_per_worker", f"must be > 0, got {gpus_per_worker}; leave use_gpu out to use none")
        ranks = num_workers if num_hosts is None else num_hosts * num_workers_per_host
        assert ranks is not None
        gpus = (1 if gpus_per_worker is None else gpus_per_worker) if use_gpu else 0
        self._demand = Demand(ranks=ranks, hosts=num_hosts, cpus=cpus_per_worker, gpus=gpus)
        self._settings = Settings() if settings is None else settings
        self._use_current = use_current_placement_group
        self._places: Places | None = None
        self._actors: list[ActorHandle] = []  # by rank

    @property
    def num_workers(self) -> int:
        """The number of ranks."""
        return self._demand.ranks

    def start(
        self,
        executable_cls: Callable[..., object] | None = None,
        executable_args: Sequence[object] | None = None,
        executable_kwargs: Mapping[str, object] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the ranks, and make an `executable_cls(*executable_args, **executable_kwargs)` on each.

        Blocks until the cluster has the resources and all ranks run. Raises `SlotsTimeout` if it lacks them for
        `placement_group_timeout`, `RendezvousError` naming ranks that do not start within `start_timeout`, and the
        `RankFailed` of a rank whose `executable_cls` raises."""
        if self._actors:
            raise ConfigError("start", "the ranks run already; call shutdown() first")
        self._places = reserve(self._demand, self._settings.placement_group_timeout, use_current=self._use_current)
        try:
            env = {name: str(value) for name, value in (extra_env_vars or {}).items()}
            self._start_actors(env)
            if executable_cls is not None:
                call = (self._prepared(executable_cls), list(executable_args or ()), dict(executable_kwargs or {}))
                self._values([actor.create.remote(*call) for actor in self._actors])
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
        callbacks: Sequence[object] | None = None,
    ) -> list[T]:
        """Call `fn(*args, **kwargs)` on every rank; return the values by rank. Blocks; raises `RankFailed`."""
        refuse_callbacks(callbacks)
        return self._values(self.run_remote(fn, args, kwargs))

    def run_remote(
        self,
        fn: Callable[..., object],
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> list[ray.ObjectRef]:
        """Start the call on every rank; return Ray's references to the values, by rank; does not block."""
        call = (self._prepared(fn), list(args or ()), dict(kwargs or {}))
        return [actor.run.remote(*call) for actor in self._running()]

    def execute(self, fn: Callable[..., T], callbacks: Sequence[object] | None = None) -> list[T]:
        """Call `fn(executable)` on every rank with the rank's own object; return the values by rank. See `run`."""
        refuse_callbacks(callbacks)
        fn = self._prepared(fn)
        return self._values([actor.execute.remote(fn) for actor in self._running()])

    def execute_single(self, fn: Callable[..., T]) -> T:
        """Call `fn(executable)` on rank 0 alone, and return its value. `fn` must not wait for other ranks."""
        (value,) = self._values([self._running()[0].execute.remote(self._prepared(fn))])
        made: T = value
        return made

    def shutdown(self) -> None:
        """End the ranks and give their resources back. Idempotent."""
        actors, self._actors = self._actors, []
        places, self._places = self._places, None
        for actor in actors:
            ray.kill(actor)
        if places is not None:
            places.release()

    def _prepared(self, fn: Callable[..., T]) -> Callable[..., T]:
        """Return `fn`; raises `PicklingError` naming the part of it that cannot be pickled."""
        dump(fn, getattr(fn, "__qualname__", "fn"))
        return fn

    def _running(self) -> list[ActorHandle]:
        if not self._actors:
            raise ConfigError("start", "no ranks run; call start() first")
        return self._actors

    def _start_actors(self, extra: Mapping[str, str]) -> None:
        places, demand = self._places, self._demand
        assert places is not None
        for bundle in places.bundles:
            strategy = PlacementGroupSchedulingStrategy(places.group, placement_group_bundle_index=bundle)
            options = {"num_cpus": demand.cpus, "num_gpus": demand.gpus, "scheduling_strategy": strategy}
            runtime = {"env_vars": dict(extra)} if extra else None
            self._actors.append(ray.remote(RankActor).options(**options, runtime_env=runtime).remote())
        identities = self._in_time([actor.host.remote() for actor in self._actors])
        order = sorted(range(demand.ranks), key=lambda number: identities.index(identities[number]))
        self._actors = [self._actors[number] for number in order]
        identities = [identities[number] for number in order]
        node = self._actors[0].serve.remote(demand.ranks, self._settings.interface)
        (address, secret, port), *_ = self._in_time([node])
        torch_store = join_address(split_address(address)[0], port)
        entered = []
        for topology, actor in zip(Topology.all_from_hosts(identities), self._actors, strict=True):
            host = host_name(topology.hosts[topology.rank])
            job = JobEnvironment.of(
                topology, host=host, rendezvous=address, secret=secret, job="", torch_store=torch_store
            )
            env = dict(extra) | job.write(torch_env=wants_torch(extra))
            if self._settings.interface is not None:
                env["FARANDOLE_INTERFACE"] = self._settings.interface
            entered.append(actor.enter.remote(env))
        self._in_time(entered)

    def _in_time(self, references: Sequence[ray.ObjectRef]) -> list[Any]:
        limit = self._settings.start_timeout.total_seconds()
        try:
            values: list[Any] = ray.get(list(references), timeout=limit)
        except GetTimeoutError as error:
            ready, _ = ray.wait(list(references), num_returns=len(references), timeout=0)
            missing = [rank for rank, each in enumerate(references) if each not in ready]
            raise RendezvousError(f"Ray did not start all ranks within {limit:g} s", missing) from error
        return values

    def _values(self, references: Sequence[ray.ObjectRef]) -> list[Any]:
        """Return the values of a call by rank; end all ranks when one fails, or at Ctrl-C."""
        waiting, limit = list(references), None
        values: dict[int, object] = {}
        failures: list[Failure] = []
        try:
            while waiting:
                ready, waiting = ray.wait(waiting, timeout=limit)
                if not ready:
                    break  # later failures would be consequences
                rank = references.index(ready[0])
                try:
                    values[rank] = ray.get(ready[0])
                except RayError as error:
                    failures.append(_failure_of(rank, error))
                    limit = SETTLE
        except BaseException:
            self.shutdown()
            raise
        if failures:
            self.shutdown()
            found = culprit(failures)
            raise found.error() from found.cause
        return [values[rank] for rank in range(len(references))]


def _failure_of(rank: int, error: RayError) -> Failure:
    """Return the failure of a rank whose call has ended with `error`."""
    if isinstance(error, RayTaskError):
        cause: BaseException = error.cause if isinstance(error.cause, BaseException) else error
        reason = "".join(traceback.format_exception_only(cause)).strip()
        return Failure(
            rank=rank,
            reason=reason,
            code=1,
            at=time.monotonic(),
            consequence=is_consequence(cause),
            traceback=_frames_of(error),
            cause=cause,
        )
    if isinstance(error, UnserializableException):  # it has the text alone
        told = str(error).strip().splitlines()[-1]
        why = "it cannot be unpickled here"
        return Failure(rank=rank, reason=told, code=1, at=time.monotonic(), traceback=_frames_of(error), no_cause=why)
    reason = f"its process has ended: {_COLOR.sub('', str(error)).strip()}"
    return Failure(rank=rank, reason=reason, code=255, at=time.monotonic(), killed=True, cause=error)


def _frames_of(error: RayError) -> str:
    """Return the rank's traceback without the lines that Ray puts above its first frame."""
    lines = _COLOR.sub("", str(error)).splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith("  File ")), len(lines))
    return "\n".join(["Traceback (most recent call last):", *lines[first:]])


def refuse_callbacks(callbacks: Sequence[object] | None) -> None:
    """Raise `ConfigError` if there are callbacks."""
    if callbacks:
        raise ConfigError("callbacks", "ranks send no values while they run; return them from the function")
