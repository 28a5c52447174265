"""Launcher for ranks on this machine: each is a process below a guard."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeAlias

from farandole.cores import available_cores
from farandole.launch.backend import Agent, Assignment, Call, Host, OnEnd, OnLine, Rank, Task
from farandole.launch.calls import RankCall
from farandole.launch.channel import Orders
from farandole.launch.failures import exit_failure
from farandole.launch.processes import RankProcess
from farandole.launch.reserved import ReservedPort
from farandole.launch.survivors import noted_end
from farandole.meeting.launched.stuck import end_here, is_stopped_here
from farandole.topology import host_identity, loopback_address

OnRankMessage: TypeAlias = Callable[[int, str, Mapping[str, object]], None]  # rank, kind, content


def _ignore(rank: int, kind: str, payload: Mapping[str, object]) -> None:
    """Ignore a message, for want of a handler."""


class LocalBackend:
    """Backend for up to `slots` ranks on this machine, which the agent in this process starts.

    `on_message` gets the messages of ranks that make a call, from any thread."""

    def __init__(self, slots: int, on_message: OnRankMessage | None = None) -> None:
        self.address, self._on_message = loopback_address(), on_message
        self.hosts = (Host("localhost", slots),)

    @contextlib.contextmanager
    def open_agents(self, hosts: Sequence[Host]) -> Iterator[Mapping[Host, Agent]]:
        """Make the agent of this machine."""
        with LocalAgent(on_message=self._on_message) as agent:
            yield dict.fromkeys(hosts, agent)


class LocalAgent:
    """The agent of this machine, in this process.

    `stop_limit` is that of `RankProcess.start` for the ranks that are started from now on."""

    first_slot = 0
    gpus: Sequence[str] = ()  # those that a cluster has given to this agent alone

    def __init__(self, address: str = "", on_message: OnRankMessage | None = None) -> None:
        self._on_message = on_message or _ignore
        self.address, self.identity = address or loopback_address(), host_identity()
        self.cores = sorted(os.sched_getaffinity(0))
        self.usable_cores = available_cores()
        self.stop_limit = 0.0
        self._ports: list[ReservedPort] = []

    def reserve_port(self) -> int:
        """Reserve a free port of this machine until the agent is closed."""
        self._ports.append(ReservedPort())
        return self._ports[-1].port

    def is_stopped(self, member: int, secret: bytes) -> bool:
        """Return whether a process of the member is stopped."""
        return is_stopped_here(member, secret)

    @property
    def silence(self) -> float:
        """0: it answers at once."""
        return 0.0

    def end_member(self, member: int, secret: bytes) -> None:
        """Kill the member's processes."""
        end_here(member, secret)

    def noted_end(self, log: str) -> int | None:
        """Return what the rank's guard has noted."""
        return noted_end(log)

    def start(self, assignment: Assignment, task: Task, on_line: OnLine, on_end: OnEnd) -> Rank:
        """Start the rank as a process of its own."""
        if isinstance(task, Call):
            return RankCall.start(
                task.payload,
                assignment.env,
                rank=assignment.rank,
                on_line=on_line,
                executable=task.executable,
                cores=assignment.cores,
                stop_limit=self.stop_limit,
                start_timeout=task.start_timeout,
                orders=Orders(keep=task.keep_all or assignment.rank == 0),
                runner=task.runner,
                on_message=functools.partial(self._on_message, assignment.rank),
                on_end=lambda call: on_end(assignment.rank, call.failure),
            )

        def ended(process: RankProcess) -> None:
            exit = process.exit
            assert exit is not None
            on_end(assignment.rank, exit_failure(exit, process.tail) if exit.code else None)

        return RankProcess.start(
            task.words,
            assignment.env,
            rank=assignment.rank,
            on_line=on_line,
            cores=assignment.cores,
            stop_limit=self.stop_limit,
            survivor_log=assignment.survivor_log,
            on_exit=ended,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for port in self._ports:
            port.close()
