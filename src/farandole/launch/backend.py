"""Interfaces between a job and the launchers that start its ranks: hosts with slots, one agent for each host.

A launcher is a module of `launch.backends` that offers a `Backend`. The job decides what each rank runs; the agent of a
host starts the host's ranks, follows them and ends them. An agent may be an object of this process, as on this machine,
or stand for a process on another host, with one channel for all ranks that it has started.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, Protocol, Self, TypeAlias, get_args

from farandole.errors import ConfigError
from farandole.launch.failures import Failure
from farandole.other_launchers import find_other_launch

OnLine: TypeAlias = Callable[[int, str, str], None]  # rank, "stdout" or "stderr", the line without its end
OnEnd: TypeAlias = Callable[[int, Failure | None], None]  # rank, its failure if any
Binding: TypeAlias = Literal["none", "cores"]

# A host or user@host. ssh would take a leading dash for an option, and gives the name to the commands of its
# configuration, which a shell reads.
_WORD = r"""(?!-)[^\s@`$;&|<>()'"\\#=,]+"""
_NAME = re.compile(f"({_WORD}@)?{_WORD}")


def check_binding(binding: str) -> None:
    """Raise `ConfigError` for an unknown binding."""
    if binding not in get_args(Binding):
        raise ConfigError("binding", f"must be {' or '.join(get_args(Binding))}, got {binding!r}")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine and the number of ranks that may run on it. Raises `ConfigError` for a name that ssh must not get."""

    name: str
    slots: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            problem = "a name begins with no dash, and has no spaces or characters of a shell"
            raise ConfigError("hosts", f"{self.name!r} is no host: {problem}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The host, the environment and the cores of a rank that is to be started; without cores it may use all.

    With a `survivor_log`, a program outlives its launcher, and its output goes to that file from then on."""

    rank: int
    host: Host
    env: Mapping[str, str]
    cores: Sequence[int] = ()
    survivor_log: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """A program as a task: each rank runs it."""

    words: Sequence[str]


@dataclass(frozen=True, slots=True)
class Call:
    """A pickled function with its arguments as a task: each rank calls it, in a Python of its own."""

    payload: bytes  # by `pickling.dump_call`
    executable: str
    start_timeout: timedelta
    runner: str = ""  # "module:function" that makes the call in the rank's process, see `worker.Runner`
    keep_all: bool = True  # send every rank's value back; else rank 0's alone


Task: TypeAlias = Command | Call


class Rank(Protocol):
    """A rank that an agent has started."""

    rank: int

    def terminate(self, grace: timedelta) -> None:
        """Send the rank SIGTERM, and kill all of its processes after `grace`. Does not wait."""
        ...

    def wait_gone(self, timeout: timedelta) -> bool:
        """Wait until no process of the rank is left; False after `timeout`."""
        ...

    def value(self) -> bytes:
        """Return the pickled value of a `Call` that has ended well."""
        ...


class Agent(Protocol):
    """Starter of ranks on one host."""

    @property
    def address(self) -> str:
        """The address at which ranks of the job's other hosts reach this one."""
        ...

    @property
    def identity(self) -> str:
        """The host's `topology.host_identity`: two names may belong to one host."""
        ...

    @property
    def cores(self) -> Sequence[int]:
        """The numbers of the cores that ranks may be bound to."""
        ...

    @property
    def usable_cores(self) -> int:
        """The number of cores that the ranks may keep busy: fewer than `cores` below a container's quota."""
        ...

    @property
    def first_slot(self) -> int:
        """The number of the agent's first slot among those of its machine, which may have agents beside it."""
        ...

    def reserve_port(self) -> int:
        """Reserve a free port for a server of a rank on this host; it stays reserved until the agent is closed."""
        ...

    def is_stopped(self, member: int, secret: bytes) -> bool:
        """Return whether a process of an elastic job's member is stopped on this host; `secret` is that of the job.

        Does not wait: an agent on another host looks now, for the next call within two seconds."""
        ...

    @property
    def silence(self) -> float:
        """The seconds for which the agent has owed an answer to `is_stopped`; 0 if it owes none."""
        ...

    def end_member(self, member: int, secret: bytes) -> None:
        """Kill the processes of an elastic job's member on this host, also stopped ones. Does not wait.

        `secret` is that of the job."""
        ...

    def noted_end(self, log: str) -> int | None:
        """Return the exit code of a rank of this host that has ended after its launcher; `log` is its survivor log.

        None if none is known. Does not wait: an agent on another host looks now, for a later call."""
        ...

    def start(self, assignment: Assignment, task: Task, on_line: OnLine, on_end: OnEnd) -> Rank:
        """Start the assigned rank with `task`. Does not wait; any thread may call `on_line` and, once, `on_end`."""
        ...


class Backend(Protocol):
    """A way to start ranks on hosts."""

    @property
    def hosts(self) -> Sequence[Host]:
        """The hosts in the order in which ranks fill their slots."""
        ...

    @property
    def address(self) -> str:
        """The address of this machine at which ranks of all hosts reach the job's rendezvous, once agents are open."""
        ...

    def open_agents(self, hosts: Sequence[Host]) -> AbstractContextManager[Mapping[Host, Agent]]:
        """Start an agent for each of `hosts`. The job ends all of their ranks before it leaves the context."""
        ...


class Shell(Protocol):
    """A way to run a program on a host, with pipes to it: ssh, or srun within an allocation."""

    def words(self, host: str, program: str) -> list[str]:
        """Return the command that runs `program` on `host`."""


class Site(ABC):
    """A batch system or cluster that has given hosts to this process: ranks fill them if the user names none."""

    counts_slots = False  # whether the user may leave out the number of ranks, for one in each slot

    @classmethod
    def find(cls, env: Mapping[str, str] | None = None) -> Self | None:
        """Return the site that the variables in `env` (default: `os.environ`) describe, else None.

        Returns None in ranks and in processes of another launcher, which start ranks on their own machine."""
        env = os.environ if env is None else env
        return None if "FARANDOLE_RANK" in env or find_other_launch(env) is not None else cls.read(env)

    @classmethod
    @abstractmethod
    def read(cls, env: Mapping[str, str]) -> Self | None:
        """Read the site's variables; return None if they are not there."""

    @abstractmethod
    def wait_for_hosts(self, num_proc: int | None, timeout: timedelta) -> Sequence[Host]:
        """Return the hosts for `num_proc` ranks (None: one per slot) once they can be used; blocks up to `timeout`.

        Raises `ConfigError`, `SlotsError` or `HostsError` if they cannot be used."""

    def shell(self, ssh: Shell, start_timeout: timedelta) -> Shell:
        """Return the shell to a host; `ssh` has the user's options."""
        return ssh

    def owns(self, file: Path) -> bool:
        """Return whether the site itself provides `file`, its host file or its discovery script."""
        return False

    def variables_of_ranks(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return `env` without the variables that describe only this process."""
        return dict(env)
