"""One rank as a process: started, listened to, and ended together with all that it starts."""

import contextlib
import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self

from farandole.launch.backend import OnLine
from farandole.launch.lines import LineSplitter

__all__ = ["GRACE", "Exit", "RankProcess"]

GRACE = timedelta(seconds=5)  # between SIGTERM and SIGKILL
TAIL_LINES = 50
LONGEST_TAIL_LINE = 2000  # characters of a line kept for the failure report

GUARD = str(Path(__file__).with_name("guard.py"))
GUARD_EXIT = 10.0  # seconds
_CHUNK = 256 * 1024
_PIPE = 1 << 20  # bytes; the largest pipe of an unprivileged process


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How a rank's process ended."""

    rank: int
    code: int  # as in subprocess: below zero the number of the signal
    at: float  # time.monotonic() of the end, taken beside the rank
    reason: str

    @property
    def signal_name(self) -> str:
        """The signal that ended it, "" when it ended by itself."""
        return _signal_name(-self.code) if self.code < 0 else ""

    @property
    def shell_code(self) -> int:
        """The code as a shell gives it: 128 + the number of the signal."""
        return 128 - self.code if self.code < 0 else self.code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _reason(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    hints: dict[int, str] = {
        signal.SIGKILL: " (the system's out-of-memory killer does that; so does `kill -9`)",
        signal.SIGSEGV: " (a crash in native code)",
        signal.SIGBUS: " (a crash in native code; a full /dev/shm does that)",
        signal.SIGABRT: " (native code called abort)",
    }
    return f"was killed by {_signal_name(-code)}{hints.get(-code, '')}"


class RankProcess:
    """The process of one rank, in a session of its own, below a guard that no descendant of the rank outlives.

    Whether this process ends the rank, returns, crashes or is killed: the guard (see guard.py) notices, and kills
    the rank with all its descendants. May be started from any thread.

    The rank ignores the signals that this process ignores, but for SIGINT and SIGTERM. So a rank below nohup survives
    a hangup."""

    def __init__(
        self,
        rank: int,
        program: str,
        guard: "subprocess.Popen[bytes]",
        control: socket.socket,
        on_line: OnLine,
        on_exit: "Callable[[RankProcess], None] | None",
    ) -> None:
        self.rank = rank
        self.pid: int | None = None  # of the rank's own process, once it runs
        self.exit: Exit | None = None
        self._program = program
        self._guard = guard
        self._control = control
        self._on_line = on_line
        self._on_exit = on_exit
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._splitters = {"stdout": LineSplitter(), "stderr": LineSplitter()}
        self._deaf: Exception | None = None  # what on_line raised: nobody hears this rank any more
        self._said = b""
        self._ended = threading.Event()
        self._gone = threading.Event()
        threading.Thread(target=self._listen, name=f"farandole-rank-{rank}", daemon=True).start()

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        rank: int,
        on_line: OnLine,
        pass_fds: Sequence[int] = (),
        cores: Iterable[int] = (),
        on_exit: "Callable[[RankProcess], None] | None" = None,
    ) -> Self:
        """Start `command` with exactly `env`, no input, the descriptors `pass_fds`, and bound to `cores` if any.

        Does not wait for it. `on_line` hears each line, `on_exit` the end, after the last line of the rank itself;
        both on the rank's own thread. A command that cannot be executed is an end with code 127 or 126."""
        ours, theirs = socket.socketpair()
        words = [str(theirs.fileno()), str(os.getpid()), _comma(cores), _comma(pass_fds)]
        with theirs:
            try:
                guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", GUARD, *words, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=dict(env),
                    pass_fds=(theirs.fileno(), *pass_fds),
                    start_new_session=True,  # Ctrl-C is the launcher's to hear; it ends the ranks in order
                    bufsize=0,
                )
            except BaseException:
                ours.close()
                raise
        return cls(rank, command[0], guard, ours, on_line, on_exit)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines of both streams, in the order in which they came."""
        return tuple(self._tail)

    def terminate(self, grace: timedelta = GRACE) -> None:
        """Ask the rank to end with SIGTERM, and SIGKILL it and all it has started after `grace`. Does not wait.

        May be called again, with a shorter grace too."""
        with contextlib.suppress(OSError):  # the guard is gone, and so is the rank
            self._control.sendall(f"T{max(0, grace // timedelta(milliseconds=1))}\n".encode())

    def wait(self, timeout: timedelta) -> Exit | None:
        """Wait for the end of the rank's own process; None when it still runs after `timeout`."""
        self._ended.wait(timeout.total_seconds())
        return self.exit

    def wait_gone(self, timeout: timedelta) -> bool:
        """Wait until the rank and all it has started are gone and their output is handed on; False after `timeout`."""
        return self._gone.wait(timeout.total_seconds())

    def value(self) -> bytes:
        """Return no bytes: a program has no value."""
        return b""

    def _listen(self) -> None:
        """The thread: hand on lines, note the end; returns when the guard and every writer are gone."""
        assert self._guard.stdout is not None and self._guard.stderr is not None
        streams = {"stdout": self._guard.stdout.fileno(), "stderr": self._guard.stderr.fileno()}
        with selectors.DefaultSelector() as selector:
            for stream, fd in streams.items():
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ, stream)
            selector.register(self._control, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    if not (self._read(key.fd, key.data) if key.data else self._obey(streams)):
                        selector.unregister(key.fileobj)
        self._guard.stdout.close()
        self._guard.stderr.close()
        self._control.close()
        try:
            self._guard.wait(GUARD_EXIT)
        except subprocess.TimeoutExpired:  # it has closed its end, there is nothing left for it to do
            self._guard.kill()
            self._guard.wait()
        self._gone.set()

    def _read(self, fd: int, stream: str) -> bool:
        """Hand on what there is to read; False at the end of the stream."""
        splitter = self._splitters[stream]
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        for line in splitter.feed(chunk) if chunk else splitter.flush():
            self._tail.append(line[:LONGEST_TAIL_LINE])
            if self._deaf is None:
                try:
                    self._on_line(self.rank, stream, line)
                except Exception as error:
                    # Without a reader the rank would block on a full pipe for ever: read on, and end it.
                    self._deaf = error
                    self.terminate()
        return bool(chunk)

    def _obey(self, streams: Mapping[str, int]) -> bool:
        """Note what the guard says; False when it is gone."""
        try:
            said = self._control.recv(4096)
        except ConnectionResetError:
            said = b""  # it left without having read our last request, which came too late
        *messages, self._said = (self._said + said).split(b"\n")
        for message in messages:
            kind, words = message[:1], message[1:].split()
            if kind == b"S":
                self.pid = int(words[0])
            elif kind == b"N":
                self.pid, error = None, int(words[0])
                code = 127 if error == errno.ENOENT else 126
                self._end(code, time.monotonic(), f"could not be started: {self._program}: {os.strerror(error)}")
            else:
                self._drain(streams)
                code = os.waitstatus_to_exitcode(int(words[0]))
                self._end(code, int(words[1]) / 1e9, _reason(code))
        if not said and self.exit is None:
            self._without_guard()
        return bool(said)

    def _drain(self, streams: Mapping[str, int]) -> None:
        """Read what the dead rank has written: it is all in the pipes, whose other writers may go on for ever."""
        for stream, fd in streams.items():
            for _ in range(_PIPE // _CHUNK):
                if not self._read(fd, stream):
                    break

    def _without_guard(self) -> None:
        """The guard was killed: the rank was too, by its parent-death signal; end the rest of its group."""
        if self.pid is None:
            self._end(126, time.monotonic(), f"could not be started: its guard ended with code {self._guard.wait()}")
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._end(-signal.SIGKILL, time.monotonic(), "was killed together with its guard process")

    def _end(self, code: int, at: float, reason: str) -> None:
        if self._deaf is not None:
            reason = f"was ended because nobody could take its output: {self._deaf}"
        self.exit = Exit(rank=self.rank, code=code, at=at, reason=reason)
        self._ended.set()
        if self._on_exit is not None:
            self._on_exit(self)


def _comma(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
