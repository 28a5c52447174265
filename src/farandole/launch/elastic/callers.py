"""Hosts of an elastic job that a cluster starts: each is an agent that calls the launcher, and has one slot."""

import contextlib
import itertools
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

from farandole.closing import Closing
from farandole.cores import threads_per_rank
from farandole.errors import RendezvousError, SlotsTimeout
from farandole.launch.agent import serve
from farandole.launch.backend import Agent, Assignment, Host, OnEnd, OnLine, Rank, Task
from farandole.launch.backends.local import LocalAgent
from farandole.launch.backends.remote import RemoteAgent
from farandole.meeting.acceptor import AcceptingThread, Acceptor, Admitted, listen
from farandole.meeting.dialer import dial
from farandole.meeting.frames import Deadline

log = logging.getLogger(__name__)

AGAIN = timedelta(seconds=10)  # for a launcher to accept an agent that it has lost


class Callers(Closing):
    """The agents that have called this launcher, each as a host: discovery and backends of an elastic job.

    Listens on `host`. The agents on one machine have numbers from 0, which become the local ranks. A rank sees the GPUs
    of its agent and of those with lower numbers, so that its own has the index of its local rank."""

    def __init__(self, secret: bytes, host: str) -> None:
        listener = listen(host)
        self.port: int = listener.getsockname()[1]
        self._changed = threading.Condition()
        self._agents: dict[str, _Caller] = {}
        self._closed = False
        acceptor = Acceptor([listener], secret, me=b"launcher", service="the launcher of an elastic job")
        self._accepting = AcceptingThread(acceptor, self._admit, name="farandole-callers")

    def wait_for(self, least: int, timeout: timedelta, where: str, check: Callable[[], None]) -> None:
        """Wait until `least` agents have called; raises `SlotsTimeout`, and what `check` raises, called each second."""
        end = time.monotonic() + timeout.total_seconds()
        while (there := len(self.find_available_hosts_and_slots())) < least:
            check()
            if time.monotonic() >= end:
                raise SlotsTimeout(least, there, f"{where} after {timeout.total_seconds():g} s")
            with self._changed:
                self._changed.wait(min(1.0, max(0.0, end - time.monotonic())))

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Return the agents whose connection holds, with one slot each."""
        with self._changed:
            gone = [name for name, agent in self._agents.items() if agent.connection.is_broken()]
            lost = [self._agents.pop(name) for name in gone]
            found = dict.fromkeys(self._agents, 1)
        for agent in lost:
            agent.close()
        return found

    def backend_of(self, host: Host) -> "_Reached":
        """Return the backend with the agent `host`; raises `ConnectionError` if it is gone."""
        with self._changed:
            agent = self._agents.get(host.name)
        if agent is None or agent.connection.is_broken():
            raise ConnectionError(f"the agent of {host.name} is gone")
        return _Reached(agent)

    def refuse_others(self) -> None:
        """Accept no agents any more."""
        self._accepting.close()

    def close(self) -> None:
        """End the connections to all agents, which end their ranks; idempotent."""
        self.refuse_others()
        with self._changed:
            self._closed = True
            agents = list(self._agents.values())
            self._agents.clear()
        for agent in agents:
            agent.close()

    def _admit(self, admitted: Admitted) -> None:
        name = f"farandole-greet-{admitted.where}"
        threading.Thread(target=self._greet, args=(admitted,), name=name, daemon=True).start()

    def _greet(self, admitted: Admitted) -> None:
        # At once, also if no rank is needed yet: an agent that hears nothing gives its launcher up.
        host = Host(admitted.who.decode(errors="replace"), 1)
        agent = _Caller(host, _Accepted(admitted.sock, admitted.where), self._beside)
        try:
            agent.greet()
        except OSError as error:
            log.warning("%s cannot take a rank: %s", host.name, error)
            return
        agent.machine_cores = agent.usable_cores
        with self._changed:
            here = [*self._beside(agent), agent]
            taken = {each.first_slot for each in here[:-1]}
            agent.first_slot = next(number for number in range(len(here)) if number not in taken)
            for each in here:
                each.usable_cores = threads_per_rank(each.machine_cores, len(here))
            if not self._closed:
                self._agents[host.name] = agent
                self._changed.notify_all()
                return
        agent.close()

    def _beside(self, agent: "_Caller") -> "list[_Caller]":
        """Return the agents on the machine of `agent`."""
        with self._changed:
            return [each for each in self._agents.values() if each.identity == agent.identity]


class _Accepted:
    """A `Connection` that an agent has opened."""

    def __init__(self, sock: socket.socket, where: str) -> None:
        self.address = str(sock.getsockname()[0])  # of this machine, as the agent knows it
        self._sock, self._where = sock, where
        self._watched = select.poll()
        self._watched.register(sock, select.POLLRDHUP)

    def pipes(self) -> tuple[int, int]:
        return self._sock.dup().detach(), self._sock.dup().detach()

    def is_broken(self) -> bool:
        """Return whether either end has ended the connection."""
        return self._sock.fileno() < 0 or bool(self._watched.poll(0))

    def abandon(self) -> None:
        self._shut(socket.SHUT_RDWR)

    def why(self, error: BaseException) -> str:
        return f"its connection from {self._where} is gone ({error})"

    def end(self, patience: float) -> None:
        self._shut(socket.SHUT_WR)
        if self._sock.fileno() >= 0:
            self._watched.poll(patience * 1000)
        self.abandon()
        self._sock.close()

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):  # the agent has ended it already
            self._sock.shutdown(how)


class _Caller(RemoteAgent):
    """An agent that has called, and shares its machine with those that `beside` returns."""

    def __init__(self, host: Host, connection: _Accepted, beside: "Callable[[_Caller], list[_Caller]]") -> None:
        super().__init__(host, connection)
        self.connection, self._beside, self.machine_cores = connection, beside, 1

    def start(self, assignment: Assignment, task: Task, on_line: OnLine, on_end: OnEnd) -> Rank:
        """Have the agent start the rank, which sees the GPUs up to its own."""
        numbered = sorted(self._beside(self), key=lambda each: each.first_slot)
        gpus = [gpu for each in numbered if each.first_slot <= self.first_slot for gpu in each.gpus]
        if gpus and "CUDA_VISIBLE_DEVICES" not in assignment.env:
            assignment = replace(assignment, env={**assignment.env, "CUDA_VISIBLE_DEVICES": ",".join(gpus)})
        return super().start(assignment, task, on_line, on_end)


class _Reached:
    """The backend of one agent that has called."""

    def __init__(self, agent: _Caller) -> None:
        self.hosts, self.address, self._agent = (agent.host,), agent.connection.address, agent

    @contextlib.contextmanager
    def open_agents(self, hosts: Sequence[Host]) -> Iterator[Mapping[Host, Agent]]:
        """Yield the agent, and end its connection with the block."""
        with contextlib.closing(self._agent):
            yield dict.fromkeys(hosts, self._agent)


def call_launcher(address: str, secret: bytes, name: str, local: LocalAgent, timeout: timedelta) -> None:
    """Serve the launcher at `address` as the host `name`, whose rank `local` starts, until it accepts no agents.

    An agent that has lost its launcher ends its rank and calls again, as another host. Blocks. Raises `RendezvousError`
    if the launcher cannot be reached within `timeout`."""
    for call in itertools.count():
        me = f"{name}+{call}" if call else name
        try:
            sock, _ = dial(address, secret, me=me.encode(), deadline=Deadline(AGAIN if call else timeout))
        except OSError as error:
            if call:
                return  # the job has ended
            raise RendezvousError(f"{name} could not reach the launcher of its job: {error}", where=address) from error
        with sock:
            serve(sock.dup().detach(), sock.dup().detach(), local, own_paths=True)
