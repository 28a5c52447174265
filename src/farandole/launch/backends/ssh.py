"""Launcher for ranks on other machines: one ssh connection per host, to an agent that starts the host's ranks."""

import contextlib
import functools
import logging
import os
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from farandole.errors import ConfigError, HostsError
from farandole.launch.backend import Agent, Host, Shell
from farandole.launch.backends.local import LocalAgent
from farandole.launch.backends.remote import LEAVE, RemoteAgent
from farandole.launch.events import result_of
from farandole.launch.hosts import is_local, route_to
from farandole.limits import require_open_files
from farandole.meeting.acceptor import listen
from farandole.meeting.addresses import join_address
from farandole.topology import interface_addresses, loopback_address

log = logging.getLogger(__name__)

FILES = 4  # open files of this process for each host
AT_ONCE = 32  # connections that are opened at the same time
CONNECT = 30.0  # seconds in which ssh has to reach a host
LAST_LINES = 5  # of ssh's own output, which explain a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssh:
    """The user's options for ssh. Keys, users, ports and jump hosts of single hosts come from ~/.ssh/config."""

    command: str = "ssh"
    port: int | None = None
    identity_file: str | None = None

    def words(self, host: str, program: str) -> list[str]:
        """Return the command that runs `program` on `host`. It asks for no password and trusts no unknown key."""
        options = ["-T", "-x", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT:.0f}"]
        options += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
        options += ["-o", "ControlMaster=no"]  # a master would wait for the connections of others through it
        options += ["-p", str(self.port)] if self.port else []
        options += ["-i", self.identity_file] if self.identity_file else []
        return [*shlex.split(self.command), *options, "--", host, program]


class SshBackend:
    """Backend for ranks on hosts that `shell` reaches. Hosts that are this machine need no shell."""

    def __init__(self, hosts: Sequence[Host], shell: Shell, *, interface: str | None = None) -> None:
        self.hosts, self._shell, self._interface = tuple(hosts), shell, interface
        self.address = ""  # found by `open_agents`

    @contextlib.contextmanager
    def open_agents(self, hosts: Sequence[Host]) -> Iterator[Mapping[Host, Agent]]:
        """Start the agents of all hosts at the same time, and find the address at which they reach this machine.

        Raises `HostsError` naming every host that cannot be used, with its reason, and `ConfigError` for more hosts
        than this process may have open files for."""
        named = interface_addresses(self._interface) if self._interface is not None else []
        remote = [host for host in hosts if not is_local(host.name)]
        require_open_files(FILES * len(remote), f"{len(remote)} hosts", functools.partial(ConfigError, "hosts"))
        with contextlib.ExitStack() as stack:
            started: dict[Host, RemoteAgent] = {}
            opened: dict[Host, RemoteAgent] = {}
            interrupted = threading.Event()

            def open_one(host: Host) -> None:
                started[host] = agent = RemoteAgent(host, _Process(host.name, self._shell.words(host.name, _program())))
                if interrupted.is_set():
                    agent.abandon()
                agent.greet()
                opened[host] = agent

            def interrupt() -> None:
                interrupted.set()
                for agent in list(started.values()):
                    agent.abandon()

            try:
                _for_all(remote, open_one, interrupt)
            finally:
                for agent in opened.values():
                    stack.callback(agent.close)
            self.address = self._find_address(opened, named, interrupt)
            local = {host: stack.enter_context(LocalAgent(self.address)) for host in hosts if host not in opened}
            yield {host: opened.get(host) or local[host] for host in hosts}

    @staticmethod
    def _find_address(agents: Mapping[Host, RemoteAgent], named: list[str], interrupt: Callable[[], None]) -> str:
        """Return the first address of this machine, or of `named`, that all agents reach; loopback without agents."""
        seen = [agent.client for agent in agents.values()]  # may be a jump host's, so this machine's own come next
        own = (route_to(agent.server) for agent in agents.values())
        candidates = named or list(dict.fromkeys([*seen, *own])) or [loopback_address()]
        refused: HostsError | None = None
        for address in filter(None, candidates):
            try:
                listener = listen(address)
            except OSError:
                continue  # it is no address of this machine
            with listener:
                here = join_address(address, listener.getsockname()[1])

                def reach(host: Host, here: str = here) -> None:
                    agents[host].reach(here)

                try:
                    _for_all(list(agents), reach, interrupt)
                    return address
                except HostsError as error:
                    refused = error
        raise refused or HostsError(
            {host.name: f"it reaches no address of this machine (tried {candidates})" for host in agents}
        )


class _Process:
    """A `Connection` by a program with pipes to a process on another host: ssh, srun or kubectl."""

    def __init__(self, host: str, words: Sequence[str]) -> None:
        self._host = host
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which then ends the ranks
        )
        self._errors = threading.Thread(target=self._read_errors, name=f"farandole-ssh-{host}", daemon=True)
        self._errors.start()

    def pipes(self) -> tuple[int, int]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._process.stdin as stdin, self._process.stdout as stdout:
            return os.dup(stdout.fileno()), os.dup(stdin.fileno())

    def abandon(self) -> None:
        self._process.kill()

    def why(self, error: BaseException) -> str:
        """Return the last lines of ssh, or else its exit code."""
        if isinstance(error, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(LEAVE)
                self._errors.join(1.0)
                return "; ".join(self._last_lines) or f"its connection ended with code {code}"
        return str(error)

    def end(self, patience: float) -> None:
        """Kill ssh unless it ends within `patience` seconds, and wait for the thread that reads its own output."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.join(LEAVE)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                self._last_lines.append(text)
                log.info("%s: %s", self._host, text)


def _for_all(hosts: Sequence[Host], action: Callable[[Host], None], interrupt: Callable[[], None]) -> None:
    """Run `action` for all hosts at the same time; raises `HostsError` with each `OSError` as a host's reason.

    At Ctrl-C calls `interrupt`, which ends the running actions."""
    reasons: dict[str, str] = {}

    def attempt(host: Host) -> None:
        try:
            action(host)
        except OSError as error:
            reasons[host.name] = str(error)

    with ThreadPoolExecutor(max(1, min(AT_ONCE, len(hosts)))) as pool:
        try:
            for each in [pool.submit(attempt, host) for host in hosts]:
                result_of(each)
        except BaseException:
            interrupt()
            raise
    if reasons:
        raise HostsError({host.name: reasons[host.name] for host in hosts if host.name in reasons})


def _program() -> str:
    """Return the remote command: the agent in the same directory; -P ignores a logging.py there."""
    path = os.environ.get("PYTHONPATH")
    variables = [f"PYTHONPATH={path}"] if path else []
    words = ["exec", "env", *variables, sys.executable, "-P", "-m", "farandole.launch.agent"]
    return f"cd {shlex.quote(os.getcwd())} && {shlex.join(words)}"
