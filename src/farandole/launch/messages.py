"""Messages between a launcher and its agent on another host, over a pair of pipes such as those of ssh.

The agent writes MARKER first, because a login shell may print other text before.

    agent -> launcher    Hello (once), Answer, Line, Looked, Recalled, End, Gone
    launcher -> agent    Ask, Start, Look, Recall, EndMember, Terminate, Quit
    both                 Alive, every few seconds
"""

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from farandole.launch.backend import Assignment
from farandole.launch.versions import Versions
from farandole.meeting.frames import Kinds, encode, frame, frame_steps, plain_fields

MARKER = b"\n--- farandole agent ---\n"
ALIVE_EVERY = 3.0  # seconds
SILENCE = 60.0  # seconds without a message after which the other end is lost
_BANNER = 1 << 16  # bytes that a login shell may print
_LARGEST = 1 << 40  # bytes; the other end is ours, and a call may be large

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The agent's host: its versions, its identity, both ends of the connection as it sees them, its cores, and the
    GPUs that a cluster has given to the agent alone."""

    versions: Versions
    identity: str
    client: str
    server: str
    cores: list[int]
    usable_cores: int
    gpus: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks the host to connect to the launcher's address `reach`; without one, to reserve a port."""

    reach: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The host's own address on the route to `reach`, or the reserved port; else why there is none."""

    reach: str
    found: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """The order to start a rank as a program (`words`), or without words as the call whose pickle is `payload`."""

    assignment: Assignment
    silence: float
    words: Sequence[str] = ()
    paths: Sequence[str] = ()
    runner: str = ""
    executable: str = ""
    start_timeout: float = 0.0
    keep_all: bool = True
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Look:
    """Asks whether a process of an elastic job's member is stopped; `secret` is that of the job."""

    member: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class EndMember:
    """Orders the agent to kill the processes of an elastic job's member; `secret` is that of the job."""

    member: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Recall:
    """Asks how a rank has ended that has outlived its launcher; `log` is its survivor log."""

    log: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """The order to end a rank, which gets `grace` seconds for it."""

    rank: int
    grace: float


@dataclass(frozen=True, slots=True)
class Quit:
    """The order to end all ranks, and the agent. Without it the launcher itself may have been lost."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a rank's output."""

    rank: int
    stream: str
    line: str


@dataclass(frozen=True, slots=True)
class Looked:
    """The answer to `Look`."""

    member: int
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class Recalled:
    """The answer to `Recall` for a rank that has ended, with its exit code; there is none for another one."""

    log: str
    code: int


@dataclass(frozen=True, slots=True)
class End:
    """The end of a rank: its failure, if it failed (`failures.to_payload`), or the pickled value of its call."""

    rank: int
    failure: Mapping[str, object] | None
    value: bytes


@dataclass(frozen=True, slots=True)
class Gone:
    """The end of the last process of a rank."""

    rank: int


FromAgent: TypeAlias = Hello | Answer | Line | Looked | Recalled | End | Gone
FromLauncher: TypeAlias = Ask | Start | Look | Recall | EndMember | Terminate | Quit
FROM_AGENT = Kinds[FromAgent | Alive](Hello, Answer, Line, Looked, Recalled, End, Gone, Alive)
FROM_LAUNCHER = Kinds[FromLauncher | Alive](Ask, Start, Look, Recall, EndMember, Terminate, Quit, Alive)


class Messages(Generic[M]):
    """One end of the pipes, which receives messages of the given kinds. Any thread may send, one receives and closes.

    A thread sends "alive" every few seconds until the outgoing pipe is closed."""

    def __init__(self, incoming: int, outgoing: int, kinds: Kinds[M | Alive]) -> None:
        self._incoming, self._outgoing, self._kinds = incoming, outgoing, kinds
        self._stopped = os.eventfd(0)
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._stay_alive, name="farandole-alive", daemon=True)
        self._thread.start()

    def send(self, message: FromAgent | FromLauncher | Alive) -> None:
        """Send a message; blocks until the pipe has taken it. Raises `OSError` when the other end is gone."""
        left = memoryview(frame(encode(message)))
        with self._sending:
            if self._closed.is_set():
                raise BrokenPipeError("the connection is closed")
            while left:
                left = left[os.write(self._outgoing, left) :]

    def receive(self, check: Callable[[Mapping[str, object]], None] | None = None) -> M:
        """Wait for a message. Raises `EOFError` when the other end is gone, `TimeoutError` after `SILENCE`, and
        `ValueError` for a message that cannot be read. Before that, `check` gets its fields and may raise, too."""
        while True:
            payload = self._read_frame()
            if check is not None and (fields := plain_fields(payload)):  # a sign of life has none
                check(fields)
            message = self._kinds.decode(payload)
            if not isinstance(message, Alive):
                return message

    def skip_banner(self, seconds: float) -> None:
        """Read up to MARKER. Raises `EOFError`, `TimeoutError`, or `ValueError` after 64 KiB of other output."""
        deadline = time.monotonic() + seconds
        seen = b"\n"
        while not seen.endswith(MARKER):
            if len(seen) > _BANNER:
                raise ValueError(f"the shell there prints {seen[:200]!r}..., and no agent answers")
            seen += self._read(1, deadline - time.monotonic())

    def close_outgoing(self) -> None:
        """Close the outgoing pipe, so that the other end reads the end of file. Idempotent."""
        with self._sending:
            if not self._closed.is_set():
                self._closed.set()
                os.close(self._outgoing)
        self._thread.join()

    def stop(self) -> None:
        """Make `receive` in another thread raise `EOFError`, now and later. Idempotent, also after `close`."""
        with self._receiving:
            if self._incoming >= 0:
                os.eventfd_write(self._stopped, 1)

    def close(self) -> None:
        """Close both pipes; only the thread that receives may call this. Idempotent."""
        self.close_outgoing()
        with self._receiving:
            if self._incoming >= 0:
                os.close(self._incoming)
                os.close(self._stopped)
                self._incoming = -1

    def _read_frame(self) -> bytes:
        steps = frame_steps(_LARGEST, "the other end")
        wanted = next(steps)
        try:
            while True:
                assert isinstance(wanted, int)
                wanted = steps.send(self._read(wanted))
        except StopIteration as done:
            payload: bytes = done.value
            return payload

    def _read(self, count: int, seconds: float | None = None) -> bytes:
        parts, seconds = [], SILENCE if seconds is None else seconds
        poller = select.poll()  # select.select refuses descriptors from 1024 on
        poller.register(self._incoming, select.POLLIN)
        poller.register(self._stopped, select.POLLIN)
        while count:
            ready = [descriptor for descriptor, _ in poller.poll(max(0.0, seconds) * 1000)]
            if not ready:
                raise TimeoutError(f"nothing came for {seconds:.3g} s")
            if self._stopped in ready:
                raise EOFError("this end was closed")
            parts.append(os.read(self._incoming, min(count, 1 << 20)))
            if not parts[-1]:
                raise EOFError("the connection was closed")
            count -= len(parts[-1])
        return b"".join(parts)

    def _stay_alive(self) -> None:
        while not self._closed.wait(ALIVE_EVERY):
            with contextlib.suppress(OSError):  # `receive` notices
                self.send(Alive())
