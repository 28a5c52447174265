"""Actors of one rank: a process in which the user's functions are called, or the agent of an elastic rank."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import ray
import ray.util

from farandole.launch.backend import Assignment, OnEnd, OnLine, Rank, Task
from farandole.launch.backends.local import LocalAgent
from farandole.launch.elastic.callers import call_launcher
from farandole.launch.reserved import ReservedPort
from farandole.meeting.handshake import new_secret
from farandole.meeting.server import RendezvousServer
from farandole.other_launchers import note_launches
from farandole.topology import OF_ONE_PROCESS, host_identity, interface_address

T = TypeVar("T")


class RankActor:
    """The actor of one rank, whose public methods the executor calls."""

    def __init__(self) -> None:
        self._server: RendezvousServer | None = None
        self._port: ReservedPort | None = None
        self._executable: object = None

    def host(self) -> str:
        """Return the identity of this rank's host."""
        return host_identity()

    def serve(self, size: int, interface: str | None) -> tuple[str, bytes, int]:
        """Serve the rendezvous of all ranks, as rank 0; return its address, the secret, and a port for torch.

        The server listens on the address by which Ray knows this node, or on that of `interface`."""
        secret = new_secret()
        host = ray.util.get_node_ip_address() if interface is None else interface_address(interface)
        self._server = RendezvousServer(size, secret, host=host)
        self._port = ReservedPort()
        return self._server.address, secret, self._port.port

    def enter(self, env: Mapping[str, str]) -> None:
        """Make this process the rank that the variables `env` describe."""
        os.environ.update(note_launches(os.environ))
        for name in OF_ONE_PROCESS & os.environ.keys():  # Ray may have been started by a rank
            del os.environ[name]
        os.environ.update(env)

    def create(self, make: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Make the object that `execute` hands to functions."""
        self._executable = make(*args, **kwargs)

    def execute(self, fn: Callable[[object], T]) -> T:
        """Call `fn` with the rank's object, and return its value."""
        return fn(self._executable)

    def run(self, fn: Callable[..., T], args: Sequence[object], kwargs: Mapping[str, object]) -> T:
        """Call `fn`, and return its value."""
        return fn(*args, **kwargs)


class AgentActor:
    """The actor of one elastic rank: an agent of the executor."""

    def serve(self, launcher: str, secret: bytes, timeout: timedelta, name: str) -> None:
        """Serve the executor until it accepts no agents."""
        with _ActorAgent() as agent:
            agent.gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
            call_launcher(launcher, secret, f"{ray.util.get_node_ip_address()}/{name}", agent, timeout)


class _ActorAgent(LocalAgent):
    """Starts ranks with the actor's environment."""

    def start(self, assignment: Assignment, task: Task, on_line: OnLine, on_end: OnEnd) -> Rank:
        """Start the rank."""
        own = {name: value for name, value in os.environ.items() if name not in {"OMP_NUM_THREADS", *OF_ONE_PROCESS}}
        env = {**own, **assignment.env}
        return super().start(replace(assignment, env=env | note_launches(env)), task, on_line, on_end)
