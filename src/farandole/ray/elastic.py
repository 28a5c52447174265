"""Executor of functions on elastic ranks, each below an actor of a Ray cluster."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import ray
from ray.actor import ActorHandle

from farandole.config import Config
from farandole.errors import ConfigError
from farandole.launch.backend import Call
from farandole.launch.elastic.callers import Callers
from farandole.launch.elastic.job import open_elastic_job
from farandole.launch.elastic.options import Elastic
from farandole.launch.output import Output
from farandole.launch.pickling import dump_call, load_value
from farandole.meeting.addresses import join_address
from farandole.meeting.handshake import new_secret
from farandole.ray.executor import refuse_callbacks
from farandole.ray.worker import AgentActor
from farandole.topology import interface_address

T = TypeVar("T")

PAUSE = 0.5  # seconds between two looks at the actors


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSettings:
    """Sizes, limits and network of an elastic job in Ray."""

    sizes: Elastic
    elastic_timeout: timedelta
    start_timeout: timedelta
    interface: str | None = None


class RayHostDiscovery:
    """Discovery of the nodes of the Ray cluster, with as many slots as their CPUs or GPUs allow."""

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        self._each = {"CPU": cpus_per_slot, **({"GPU": gpus_per_slot} if use_gpu else {})}

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Return the slots of each node that is alive, by its address."""
        nodes = {node["NodeManagerAddress"]: node["Resources"] for node in ray.nodes() if node["alive"]}
        slots = {
            host: min(int(resources.get(name, 0.0) // each) for name, each in self._each.items() if each)
            for host, resources in nodes.items()
        }
        return {host: number for host, number in slots.items() if number > 0}


class ElasticRayExecutor:
    """Calls a function on ranks that may be lost and replaced, each below a Ray actor of its own.

    Ray places an actor where resources are free, now or when nodes are added. The rank of an actor or a node that is
    lost is replaced when Ray has a place for it."""

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 120,
        ssh_identity_file: str | None = None,
        nics: Sequence[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
    ) -> ElasticSettings:
        """Return settings, given times in seconds, and Horovod's older names `min_np` and `max_np`.

        Ray needs no ssh. Each host uses the first of `nics` that it has and that connects."""
        del ssh_identity_file
        sizes = Elastic(
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
        )
        times = timedelta(seconds=elastic_timeout), timedelta(seconds=timeout_s)
        return ElasticSettings(
            sizes=sizes, elastic_timeout=times[0], start_timeout=times[1], interface=",".join(nics or ()) or None
        )

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        """Plan ranks with `cpus_per_slot` CPUs and, with `use_gpu`, `gpus_per_slot` GPUs (default: 1) each."""
        if not override_discovery:
            raise ConfigError("override_discovery", "must be True: Ray itself places the ranks' actors")
        if gpus_per_slot is not None and not use_gpu:
            raise ConfigError("gpus_per_slot", "needs use_gpu=True")
        self._settings = settings
        self._env = {name: str(value) for name, value in (env_vars or {}).items()}
        self._gpus = (1 if gpus_per_slot is None else gpus_per_slot) if use_gpu else 0
        self._cpus = cpus_per_slot
        self._discovery = RayHostDiscovery(use_gpu, cpus_per_slot, self._gpus or 1)

    def start(self) -> None:
        """Do nothing: `run` starts the ranks."""

    def run(self, worker_fn: Callable[[], T], callbacks: Sequence[object] | None = None) -> list[T]:
        """Call `worker_fn()` on the ranks and return the values of the last ranks.

        Blocks; Ctrl-C ends all ranks. Raises `SlotsTimeout` if Ray starts fewer than the least number of ranks in time,
        and the `RankFailed` of the failure that has ended the training."""
        refuse_callbacks(callbacks)
        settings, secret = self._settings, new_secret()
        slots = sum(self._discovery.find_available_hosts_and_slots().values())
        sizes = settings.sizes
        least = sizes.min_num_proc or 1
        most = max(least, slots) if sizes.max_num_proc is None else sizes.max_num_proc
        times = Config.from_environment(
            self._env, start_timeout=settings.start_timeout, elastic_timeout=settings.elastic_timeout
        )
        limits = replace(sizes, max_num_proc=most).limits(max(least, min(slots, most)), times)
        call = Call(dump_call(worker_fn, (), {}), "", settings.start_timeout)
        interface = settings.interface
        host = ray.util.get_node_ip_address() if interface is None else interface_address(interface)
        with ExitStack() as stack:
            show = stack.enter_context(Output(limits.most))
            callers = stack.enter_context(Callers(secret, host))
            make = ray.remote(AgentActor).options(num_cpus=self._cpus, num_gpus=self._gpus).remote
            orders = join_address(host, callers.port), secret, settings.start_timeout
            actors = _Actors(limits.most, lambda: make(), orders)
            stack.callback(actors.close)
            callers.wait_for(limits.least, settings.start_timeout, "the Ray cluster", lambda: None)
            job = stack.enter_context(open_elastic_job(limits, callers, callers.backend_of, self._env))
            stack.callback(callers.refuse_others)
            failure = job.run(call, show)
            if failure is not None:
                raise failure.error() from failure.cause
            return [load_value(rank, value) for rank, value in enumerate(job.values())]


class _Actors:
    """So many actors, which a thread replaces when they are lost."""

    def __init__(self, number: int, make: Callable[[], ActorHandle], orders: tuple[str, bytes, timedelta]) -> None:
        self._make, self._orders = make, orders
        self._serving: dict[ray.ObjectRef, ActorHandle] = {}
        self._started = 0
        for _ in range(number):
            self._add()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farandole-actors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the actors, and what runs below them."""
        self._stop.set()
        self._thread.join()
        for actor in self._serving.values():
            ray.kill(actor)

    def _add(self) -> None:
        actor = self._make()
        self._serving[actor.serve.remote(*self._orders, f"actor-{self._started}")] = actor
        self._started += 1

    def _run(self) -> None:
        while not self._stop.wait(PAUSE):
            for ended in ray.wait(list(self._serving), num_returns=len(self._serving), timeout=0)[0]:
                ray.kill(self._serving.pop(ended))
                self._add()
