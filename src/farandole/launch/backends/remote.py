"""Agent on another host, at the other end of any connection: it starts the host's ranks for a launcher here."""

import contextlib
import logging
import math
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

from farandole.errors import HostsError
from farandole.launch import messages
from farandole.launch.backend import Assignment, Call, Host, OnEnd, OnLine, Rank, Task
from farandole.launch.failures import OUTPUT_REFUSED, Failure, from_payload
from farandole.launch.messages import Answer, FromAgent, Messages
from farandole.launch.processes import GRACE
from farandole.launch.versions import check_fields

log = logging.getLogger(__name__)

ANSWER = 120.0  # seconds for an agent to start, or to answer; a busy Slurm takes its time for a step
LEAVE = 15.0  # seconds for an agent to end
FRESH = 2.0  # seconds after which an answer about a stopped process counts no more


class Connection(Protocol):
    """A way to an agent: the process of ssh, or a connection that the agent has opened."""

    def pipes(self) -> tuple[int, int]:
        """Return descriptors to read from and to write to, which the caller closes."""
        ...

    def abandon(self) -> None:
        """Break the connection, so that all waits for the agent end with an error; any thread may call this."""
        ...

    def why(self, error: BaseException) -> str:
        """Return why the connection is gone, given the error that it has raised."""
        ...

    def end(self, patience: float) -> None:
        """Let the agent end the connection, and break it after `patience` seconds; blocks for as long."""
        ...


class RemoteAgent:
    """The agent of another host: a process there, at the other end of `connection`.

    The constructor does not wait; the agent can be used after `greet`."""

    first_slot = 0

    def __init__(self, host: Host, connection: Connection) -> None:
        self.host, self.address = host, ""
        self._connection = connection
        self._listener: threading.Thread | None = None
        self._ranks: dict[int, _RemoteRank] = {}
        self._lost: str | None = None
        self._answers: dict[str, Answer] = {}
        self._stopped: dict[int, float] = {}  # members, and the time at which the agent found them stopped
        self._asked = math.inf  # the time of the first question about a member that has no answer yet
        self._recalled: dict[str, int] = {}  # logs of ranks that have ended without their launcher, and exit codes
        self._changed = threading.Condition()
        self._messages = Messages[FromAgent](*connection.pipes(), messages.FROM_AGENT)

    def greet(self) -> None:
        """Wait until the agent has answered. If it does not, end it and raise `OSError` with the reason."""
        try:
            self._messages.skip_banner(ANSWER)
            hello = self._messages.receive(check_fields)
            assert isinstance(hello, messages.Hello), hello
        except BaseException as error:
            why = self._connection.why(error)
            self._messages.close()
            self._end(0.0)
            if isinstance(error, (EOFError, TimeoutError, ValueError)):
                raise OSError(why) from error
            raise
        self.client, self.server, self.identity = hello.client, hello.server, hello.identity
        self.cores, self.usable_cores, self.gpus = hello.cores, hello.usable_cores, hello.gpus
        self._listener = threading.Thread(target=self._listen, name=f"farandole-agent-{self.host.name}", daemon=True)
        self._listener.start()

    def abandon(self) -> None:
        """Kill the connection, so that all waits for the agent, in any thread, end with an error."""
        self._connection.abandon()

    def reach(self, address: str) -> None:
        """Have the host connect to `address`, and note its own; raises `OSError` with the reason if it cannot."""
        self.address = self._ask(address)

    def reserve_port(self) -> int:
        """Reserve a free port of the host until the agent is closed; raises `HostsError` with the reason."""
        try:
            return int(self._ask(""))
        except OSError as error:
            raise HostsError({self.host.name: str(error)}) from error

    def start(self, assignment: Assignment, task: Task, on_line: OnLine, on_end: OnEnd) -> Rank:
        """Have the host start the rank."""
        rank = _RemoteRank(assignment.rank, self._messages, on_line, on_end)
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

    def is_stopped(self, member: int, secret: bytes) -> bool:
        """Return whether the agent has just found a process of the member stopped, and have it look again."""
        self._asked = min(self._asked, time.monotonic())  # first: the answer, which another thread gets, ends it
        with contextlib.suppress(OSError):  # the host is lost
            self._messages.send(messages.Look(member, secret))
        return time.monotonic() - self._stopped.get(member, -math.inf) < FRESH

    @property
    def silence(self) -> float:
        """The seconds for which the agent has owed an answer to `is_stopped`; 0 if it owes none."""
        return max(0.0, time.monotonic() - self._asked)

    def end_member(self, member: int, secret: bytes) -> None:
        """Have the agent kill the member's processes."""
        with contextlib.suppress(OSError):  # the host is lost
            self._messages.send(messages.EndMember(member, secret))

    def noted_end(self, log: str) -> int | None:
        """Return what the agent has answered, and have it look again."""
        if log not in self._recalled:
            with contextlib.suppress(OSError):  # the host is lost
                self._messages.send(messages.Recall(log))
        return self._recalled.get(log)

    def close(self) -> None:
        """End the agent, which ends its ranks, and the connection. Idempotent."""
        with contextlib.suppress(OSError):  # the host is lost
            self._messages.send(messages.Quit())
        self._messages.close_outgoing()
        self._end(LEAVE)

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
                elif isinstance(message, messages.Looked):
                    self._asked = math.inf
                    if message.is_stopped:
                        self._stopped[message.member] = time.monotonic()
                elif isinstance(message, messages.Recalled):
                    self._recalled[message.log] = message.code
                elif not isinstance(message, messages.Hello):
                    self._ranks[message.rank].handle(message)
        except (EOFError, OSError) as error:  # TimeoutError too
            why = self._connection.why(error)
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

    def _end(self, patience: float) -> None:
        """End the connection, within `patience` seconds if the agent ends by itself, and the thread that reads it."""
        self._connection.end(patience)
        if self._listener is not None:
            # A process that ssh has left behind may hold the pipe open.
            self._listener.join(LEAVE)
            self._messages.stop()
            self._listener.join(LEAVE)


class _RemoteRank:
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
