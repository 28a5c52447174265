"""Hosts of an elastic job: which there are, and an agent on each."""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Protocol

from farandole.errors import ConfigError, FarandoleError
from farandole.launch.backend import Agent, Backend, Host
from farandole.launch.scripts import parse_script_hosts, run_script
from farandole.meeting.addresses import split_address

__all__ = ["Agents", "Found", "HostDiscovery", "HostScript", "Opened", "OpenedAgent", "Watch", "log_hosts"]

log = logging.getLogger(__name__)

PAUSE = 1.0  # seconds between two questions to a discovery


@dataclass(frozen=True, slots=True)
class Found:
    """Event: the hosts that there are now."""

    hosts: Sequence[Host]


@dataclass(frozen=True, slots=True)
class OpenedAgent:
    """An agent, and the address of this machine at which its ranks reach the launcher."""

    agent: Agent
    address: str
    close: Callable[[], None]

    def find(self, other: "OpenedAgent", addresses: Sequence[str]) -> str:
        """Return the one of the `addresses` of a rank of `other` at which ranks of this agent find it.

        It is the first one within a host. A rank of this machine is found where the other host finds the launcher."""
        at = self.address if ip_address(other.agent.address).is_loopback else other.agent.address
        others = [each for each in addresses if split_address(each)[0] == at]
        same = self.agent.identity == other.agent.identity
        return (addresses if same or not others else others)[0]


@dataclass(frozen=True, slots=True)
class Opened:
    """Event: the agent of a host can be used, or the reason why not."""

    host: str
    opened: OpenedAgent | None
    problem: str = ""


class HostDiscovery(Protocol):
    """Horovod's interface of a discovery."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Return the slots of each host that there is now."""
        ...


class HostScript:
    """Discovery by a script that prints a line for each host: its name, or name:slots."""

    def __init__(self, discovery_script: str | os.PathLike[str], slots: int | None = None) -> None:
        self._script, self._slots = Path(discovery_script), slots or 1

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Run the script; raises `ConfigError` when it fails, or does not end within 30 s."""
        return {host.name: host.slots for host in parse_script_hosts(run_script(self._script), self._slots)}


class Watch:
    """Thread that asks a discovery each second, and puts `Found` into `events` when the hosts change.

    The constructor asks once itself, so that a discovery that never works fails at once. Later errors are logged, and
    the hosts are taken to be as they were. A host has to be missing twice in a row: scripts that read a list while
    another process writes it see half of it."""

    def __init__(self, discovery: HostDiscovery, events: "queue.SimpleQueue[object]") -> None:
        self._discovery, self._events = discovery, events
        self._hosts = self._missing = _ask(discovery)
        events.put(Found(_as_hosts(self._hosts)))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farandole-discovery", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after the discovery's answer if it is being asked; idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        failing = False
        while not self._stop.wait(PAUSE):
            try:
                now = _ask(self._discovery)
            except Exception as error:  # of the user's discovery: anything
                if not failing:
                    log.warning("the discovery of hosts failed, they are taken to be as before: %s", error)
                failing = True
                continue
            failing = False
            settled = {**{name: slots for name, slots in self._hosts.items() if name in self._missing}, **now}
            self._missing = now
            if settled != self._hosts:
                self._hosts = settled
                self._events.put(Found(_as_hosts(settled)))


def log_hosts(hosts: Sequence[Host], wanted: int) -> None:
    """Log the hosts; warn if a job that begins would wait for slots for `wanted` ranks."""
    log.info("hosts: %s", ", ".join(f"{host.name}:{host.slots}" for host in hosts) or "none")
    slots = sum(host.slots for host in hosts)
    if slots < wanted:
        log.warning("%d ranks (-np) have %d slots: the job waits for more until the start timeout", wanted, slots)


def _ask(discovery: HostDiscovery) -> dict[str, int]:
    return dict(discovery.find_available_hosts_and_slots())


def _as_hosts(slots: Mapping[str, int]) -> list[Host]:
    return [Host(name, number) for name, number in slots.items() if number > 0]


class Agents:
    """The agents of hosts, opened one by one as hosts are needed; an agent that is lost is opened anew."""

    def __init__(self, backend_of: Callable[[Host], Backend], events: "queue.SimpleQueue[object]") -> None:
        self._backend_of, self._events = backend_of, events
        self._opening: dict[str, threading.Thread] = {}
        self._opened: dict[str, OpenedAgent] = {}

    def find(self, host: Host) -> OpenedAgent | None:
        """Return the host's agent; None while it is opened, which is begun now and ends with the event `Opened`."""
        if host.name not in self._opened and host.name not in self._opening:
            thread = threading.Thread(target=self._open, args=(host,), name=f"farandole-open-{host.name}", daemon=True)
            self._opening[host.name] = thread
            thread.start()
        return self._opened.get(host.name)

    def opened(self, host: str) -> OpenedAgent | None:
        """Return the host's agent if it is open; begins nothing."""
        return self._opened.get(host)

    def note(self, event: Opened) -> None:
        """Take the result of an opening; called by the thread that calls `find`."""
        self._opening.pop(event.host).join()
        if event.opened is not None:
            self._opened[event.host] = event.opened

    def drop(self, host: str) -> None:
        """Close the agent of a host that is lost or gone, with all of its ranks."""
        opened = self._opened.pop(host, None)
        if opened is not None:
            opened.close()

    def close(self) -> None:
        """Close all agents; blocks until those that are being opened are open, or have failed."""
        for thread in list(self._opening.values()):
            thread.join()
        while self._opening:
            event = self._events.get()
            if isinstance(event, Opened):
                self.note(event)
        for host in list(self._opened):
            self.drop(host)

    def _open(self, host: Host) -> None:
        stack = contextlib.ExitStack()
        try:
            backend = self._backend_of(host)
            agent = stack.enter_context(backend.open_agents([host]))[host]
            self._events.put(Opened(host.name, OpenedAgent(agent, backend.address, stack.close)))
        except (FarandoleError, OSError) as error:
            stack.close()
            self._events.put(Opened(host.name, None, str(error)))
        except BaseException as error:
            stack.close()
            self._events.put(Opened(host.name, None, f"{type(error).__name__}: {error}"))
            raise


class FixedHosts:
    """Discovery of hosts that stay; Horovod's name."""

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self.set(host_slots)

    def set(self, host_slots: Mapping[str, int]) -> None:
        """Replace the hosts."""
        self._slots = dict(host_slots)

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Return the hosts."""
        if any(slots < 0 for slots in self._slots.values()):
            raise ConfigError("hosts", f"slots must be >= 0, got {self._slots}")
        return self._slots
