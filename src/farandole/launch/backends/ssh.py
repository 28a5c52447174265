"""Launcher for ranks on other machines: one ssh connection per host, to an agent that starts the host's ranks."""

import contextlib
import functools
import logging
import os
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import timedelta

from farandole.errors import ConfigError, HostsError
from farandole.launch import messages
from farandole.launch.backend import Agent, Assignment, Call, Host, OnEnd, OnLine, Shell, Task
from farandole.launch.backends.local import LocalAgent
from farandole.launch.failures import OUTPUT_REFUSED, Failure, from_payload
from farandole.launch.hosts import is_local, route_to
from farandole.launch.messages import Answer, FromAgent, Messages
from farandole.launch.processes import GRACE
from farandole.launch.versions import check_fields
from farandole.limits import require_open_files
from farandole.meeting.acceptor import listen
from farandole.meeting.addresses import join_address
from farandole.topology import interface_addresses, loopback_address

__all__ = ["Ssh", "SshBackend"]

log = logging.getLogger(__name__)

FILES = 4  # open files of this process for each host
AT_ONCE = 32  # connections that are opened at the same time
CONNECT = 30.0  # seconds in which ssh has to reach a host
ANSWER = 120.0  # seconds for an agent to start, or to answer; a busy Slurm takes its time for a step
LEAVE = 15.0  # seconds for an agent to end
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
            started: dict[Host, SshAgent] = {}
            opened: dict[Host, SshAgent] = {}
            interrupted = threading.Event()

            def open_one(host: Host) -> None:
                started[host] = agent = SshAgent(host, self._shell)
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
    def _find_address(agents: "Mapping[Host, SshAgent]", named: list[str], interrupt: Callable[[], None]) -> str:
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


class SshAgent:
    """The agent of another host: a process there, at the other end of an ssh connection.

    The constructor starts it and does not wait; it can be used after `greet`."""

    def __init__(self, host: Host, shell: Shell) -> None:
        self.host, self.address = host, ""
        self._listener: threading.Thread | None = None
        self._ranks: dict[int, _SshRank] = {}
        self._lost: str | None = None
        self._answers: dict[str, Answer] = {}
        self._changed = threading.Condition()
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._process = subprocess.Popen(
            shell.words(host.name, _program()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which then ends the ranks
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        pipes = os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno())
        self._messages = Messages[FromAgent](*pipes, messages.FROM_AGENT)
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors = threading.Thread(target=self._read_errors, name=f"farandole-ssh-{host.name}", daemon=True)
        self._errors.start()

    def greet(self) -> None:
        """Wait until the agent has answered. If it does not, end it and raise `OSError` with the reason."""
        try:
            self._messages.skip_banner(ANSWER)
            hello = self._messages.receive(check_fields)
            assert isinstance(hello, messages.Hello), hello
        except BaseException as error:
            why = self._why(error)
            self._messages.close()
            self._end_process(0.0)
            if isinstance(error, (EOFError, TimeoutError, ValueError)):
                raise OSError(why) from error
            raise
        self.client, self.server, self.identity = hello.client, hello.server, hello.identity
        self.cores, self.usable_cores = hello.cores, hello.usable_cores
        self._listener = threading.Thread(target=self._listen, name=f"farandole-agent-{self.host.name}", daemon=True)
        self._listener.start()

    def abandon(self) -> None:
        """Kill the connection, so that all waits for the agent, in any thread, end with an error."""
        self._process.kill()

    def reach(self, address: str) -> None:
        """Have the host connect to `address`, and note its own; raises `OSError` with the reason if it cannot."""
        self.address = self._ask(address)

    def reserve_port(self) -> int:
        """Reserve a free port of the host until the agent is closed; raises `HostsError` with the reason."""
        try:
            return int(self._ask(""))
        except OSError as error:
            raise HostsError({self.host.name: str(error)}) from error

    def start(self, assignment: Assignment, task: Task, on_line: OnLine, on_end: OnEnd) -> "_SshRank":
        """Have the host start the rank."""
        rank = _SshRank(assignment.rank, self._messages, on_line, on_end)
        with self._changed:
            self._ranks[assignment.rank] = rank
            lost = self._lost
        if isinstance(task, Call):
            seconds = task.start_timeout.total_seconds()
            call = (sys.path, task.runner, task.executable, seconds, task.keep_all, task.payload)
            order = messages.Start(assignment, messages.SILENCE, (), *call)
        else:
            order = messages.Start(assignment, messages.SILENCE, task.words)
        try:
            if lost is None:
                self._messages.send(order)
        except OSError:
            lost = self._lost or "its connection broke"
        if lost is not None:
            rank.lose(self.host.name, lost)
        return rank

    def close(self) -> None:
        """End the agent, which ends its ranks, and the connection. Idempotent."""
        with contextlib.suppress(OSError):  # the host is lost
            self._messages.send(messages.Quit())
        self._messages.close_outgoing()
        self._end_process(LEAVE)

    def _ask(self, reach: str) -> str:
        """Send a question and wait for its answer; raises `OSError` with the reason if there is none."""
        with self._changed:
            self._messages.send(messages.Ask(reach))
            self._changed.wait_for(lambda: reach in self._answers or self._lost is not None, ANSWER)
            answer = self._answers.pop(reach, None)
        if answer is None:
            raise OSError(self._lost or f"its agent did not answer within {ANSWER:.0f} s")
        if answer.problem:
            what = f"it cannot reach this machine at {reach}" if reach else "no port can be reserved there"
            raise OSError(f"{what}: {answer.problem}")
        return answer.found

    def _listen(self) -> None:
        """Pass on the agent's messages; the body of the thread, until the agent is gone."""
        try:
            while True:
                message = self._messages.receive()
                if isinstance(message, Answer):
                    with self._changed:
                        self._answers[message.reach] = message
                        self._changed.notify_all()
                elif not isinstance(message, messages.Hello):
                    self._ranks[message.rank].handle(message)
        except (EOFError, OSError) as error:  # TimeoutError too
            why = self._why(error)
        except Exception as error:  # the ranks must be reported as lost
            log.exception("the agent of %s sent a message that cannot be read", self.host.name)
            why = f"its agent sent a message that cannot be read ({type(error).__name__}: {error})"
        self._lost = why
        self.abandon()  # ends a `send` that blocks, perhaps with the lock below
        with self._changed:
            self._changed.notify_all()
            ranks = list(self._ranks.values())
        unseen = [str(rank.rank) for rank in ranks if not rank.is_gone()]
        if unseen:
            log.warning(
                "%s was lost: its ranks (%s) cannot be seen to end; they end by themselves within %.0f s",
                self.host.name,
                ", ".join(unseen),
                messages.SILENCE,
            )
        for rank in ranks:
            rank.lose(self.host.name, why)
        self._messages.close()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                self._last_lines.append(text)
                log.info("%s: %s", self.host.name, text)

    def _why(self, error: BaseException) -> str:
        """Return why the connection is gone: the last lines of ssh, or else its exit code."""
        if isinstance(error, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(LEAVE)
                self._errors.join(1.0)
                return "; ".join(self._last_lines) or f"its connection ended with code {code}"
        return str(error)

    def _end_process(self, patience: float) -> None:
        """Kill ssh unless it ends within `patience` seconds, and wait for the threads that read from it."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._listener is not None:
            # A process that ssh has left behind may hold the pipe open.
            self._listener.join(LEAVE)
            self._messages.stop()
            self._listener.join(LEAVE)
        self._errors.join(LEAVE)


class _SshRank:
    """A rank on another host."""

    def __init__(self, rank: int, messages: Messages[FromAgent], on_line: OnLine, on_end: OnEnd) -> None:
        self.rank, self._messages, self._on_line, self._on_end = rank, messages, on_line, on_end
        self._line_error: Exception | None = None  # raised by on_line, which gets no further lines
        self._value = b""
        self._ended = threading.Lock()  # acquired at the rank's end, and never released
        self._gone = threading.Event()

    def handle(self, message: messages.Line | messages.End | messages.Gone) -> None:
        """Handle a message about this rank."""
        if isinstance(message, messages.Line):
            self._pass_on(message.stream, message.line)
        elif isinstance(message, messages.Gone):
            self._gone.set()
        elif self._ended.acquire(blocking=False):
            self._value, payload = message.value, message.failure
            # The failure gets the time of its arrival, because clocks of hosts are unrelated.
            failure = from_payload(self.rank, payload, time.monotonic()) if payload else None
            if failure is not None and self._line_error is not None:
                failure = replace(failure, reason=f"{OUTPUT_REFUSED}: {self._line_error}")
            self._on_end(self.rank, failure)

    def is_gone(self) -> bool:
        """Return whether the host has reported that no process of the rank is left."""
        return self._gone.is_set()

    def lose(self, host: str, why: str) -> None:
        """Report the rank as failed, unless it has ended: its host is lost, and its guard ends it there."""
        if self._ended.acquire(blocking=False):
            reason = f"its host {host} was lost: {why}"
            self._on_end(self.rank, Failure(rank=self.rank, reason=reason, code=255, killed=True))
        self._gone.set()  # no further message about it can arrive

    def _pass_on(self, stream: str, line: str) -> None:
        if self._line_error is None:
            try:
                self._on_line(self.rank, stream, line)
            except Exception as error:
                self._line_error = error  # the host's other ranks continue
                self.terminate(GRACE)

    def terminate(self, grace: timedelta) -> None:
        """Have the host end the rank. Does not wait."""
        with contextlib.suppress(OSError):  # the host and its ranks are lost
            self._messages.send(messages.Terminate(self.rank, grace.total_seconds()))

    def wait_gone(self, timeout: timedelta) -> bool:
        """Wait until the host reports that no process of the rank is left; return False after `timeout`."""
        return self._gone.wait(timeout.total_seconds())

    def value(self) -> bytes:
        """Return the pickled value of a call that has ended well."""
        return self._value


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
                # With a timeout: the signal of Ctrl-C may go to another thread; Python handles it when this one wakes.
                while wait([each], timeout=1.0).not_done:
                    continue
                each.result()
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
