"""Process of one rank: its start, its output, its end with all of its descendants."""

import contextlib
import errno
import logging
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
from datetime import timedelta
from pathlib import Path
from typing import Self

from farandole.launch.backend import OnLine
from farandole.launch.failures import OUTPUT_REFUSED, Exit, reason_of
from farandole.launch.family import end_family, new_family
from farandole.launch.lines import LineSplitter
from farandole.meeting.launched.stuck import FAMILY, is_stopped

log = logging.getLogger(__name__)

GRACE = timedelta(seconds=5)  # between SIGTERM and SIGKILL
TAIL_LINES = 50
LONGEST_TAIL_LINE = 2000  # characters of a line kept for the failure report

GUARD = str(Path(__file__).with_name("guard.py"))
GUARD_EXIT = 10.0  # seconds
CHECK_EVERY = 0.5  # seconds between two checks of the guard and the rank
STOPPED_CHECKS = 3  # consecutive checks that find the guard stopped before it counts as lost
KILL_PATIENCE = 5.0  # seconds for processes to end after SIGKILL
_CHUNK = 256 * 1024
_PIPE = 1 << 20  # bytes; the largest pipe of an unprivileged process


class RankProcess:
    """The process of one rank, in a session of its own, below a guard process.

    The guard (see guard.py) kills the rank with all of its descendants when this process ends the rank, returns,
    crashes or is killed. Any thread may start a rank. The rank ignores the signals that this process ignores, except
    SIGINT and SIGTERM, so a rank below nohup survives a hangup."""

    def __init__(
        self,
        rank: int,
        program: str,
        guard: "subprocess.Popen[bytes]",
        control: socket.socket,
        family: str,
        on_line: OnLine,
        on_exit: "Callable[[RankProcess], None] | None",
    ) -> None:
        self.rank = rank
        self.pid: int | None = None  # of the rank's own process, once it runs
        self.exit: Exit | None = None
        self._program = program
        self._guard = guard
        self._control = control
        self._family = family
        self._survivors: list[int] = []
        self._stopped_checks = 0  # consecutive checks that have found the guard stopped
        self._rank_stopped = False
        self._on_line = on_line
        self._on_exit = on_exit
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._splitters = {"stdout": LineSplitter(), "stderr": LineSplitter()}
        self._line_error: Exception | None = None  # raised by on_line, which gets no further lines
        self._partial = b""
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
        stop_limit: float = 0.0,
        survivor_log: str = "",
        on_exit: "Callable[[RankProcess], None] | None" = None,
    ) -> Self:
        """Start `command` with `env` and FARANDOLE_FAMILY, no input and `pass_fds`, bound to `cores` if any.

        The rank is killed once this process has been stopped (SIGSTOP) for `stop_limit` seconds; 0: no limit. With a
        `survivor_log` it goes on when this process ends, and that file gets its output then. Does not wait. A thread of
        this rank calls `on_line` for each line, then `on_exit`. A command that cannot be executed ends with code 127 or
        126."""
        ours, theirs = socket.socketpair()
        family = new_family()
        words = [str(theirs.fileno()), str(os.getpid()), str(stop_limit), _comma(cores), _comma(pass_fds), survivor_log]
        with theirs:
            try:
                guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", GUARD, *words, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**env, FAMILY: family},
                    pass_fds=(theirs.fileno(), *pass_fds),
                    start_new_session=True,  # Ctrl-C reaches the launcher alone, which then ends the ranks
                    bufsize=0,
                )
            except BaseException:
                ours.close()
                raise
        try:
            return cls(rank, command[0], guard, ours, family, on_line, on_exit)
        except BaseException:  # no thread can be started
            ours.close()
            with guard:  # it ends when its connection is closed
                raise

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines of both streams, in order of arrival."""
        return tuple(self._tail)

    def terminate(self, grace: timedelta = GRACE) -> None:
        """Send the rank SIGTERM, and SIGKILL to the rank and all of its descendants after `grace`. Does not wait.

        May be called again, also with a shorter grace."""
        with contextlib.suppress(OSError):  # the guard is gone, and so is the rank
            self._control.sendall(f"T{max(0, grace // timedelta(milliseconds=1))}\n".encode())

    def wait(self, timeout: timedelta) -> Exit | None:
        """Wait for the end of the rank's own process; return None if it still runs after `timeout`."""
        self._ended.wait(timeout.total_seconds())
        return self.exit

    def wait_gone(self, timeout: timedelta) -> bool:
        """Wait until the rank and its descendants are gone and `on_line` has their output; False after `timeout`."""
        return self._gone.wait(timeout.total_seconds())

    def value(self) -> bytes:
        """Return no bytes: a program has no value."""
        return b""

    def _listen(self) -> None:
        """Pass on lines and the end; the body of the thread, which ends when the guard and every writer are gone."""
        assert self._guard.stdout is not None and self._guard.stderr is not None
        streams = {"stdout": self._guard.stdout.fileno(), "stderr": self._guard.stderr.fileno()}
        with selectors.DefaultSelector() as selector:
            for stream, fd in streams.items():
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ, stream)
            selector.register(self._control, selectors.EVENT_READ)
            next_check = time.monotonic() + CHECK_EVERY
            while selector.get_map():
                if time.monotonic() >= next_check:
                    self._check_stopped()
                    next_check = time.monotonic() + CHECK_EVERY
                for key, _ in selector.select(CHECK_EVERY):
                    if not (self._read(key.fd, key.data) if key.data else self._read_guard(streams)):
                        selector.unregister(key.fileobj)
        self._guard.stdout.close()
        self._guard.stderr.close()
        self._control.close()
        if not self._survivors:
            self._gone.set()

    def _read(self, fd: int, stream: str) -> bool:
        """Read a chunk and pass on its lines; returns False at the end of the stream."""
        splitter = self._splitters[stream]
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        for line in splitter.feed(chunk) if chunk else splitter.flush():
            self._tail.append(line[:LONGEST_TAIL_LINE])
            if self._line_error is None:
                try:
                    self._on_line(self.rank, stream, line)
                except Exception as error:
                    # Without a reader the rank would block on a full pipe for ever: continue to read, and end the rank.
                    self._line_error = error
                    self.terminate()
        return bool(chunk)

    def _read_guard(self, streams: Mapping[str, int]) -> bool:
        """Read the guard's messages; returns False when it is gone."""
        try:
            received = self._control.recv(4096)
        except ConnectionResetError:
            received = b""  # the guard ended without reading the last request, which came too late
        *messages, self._partial = (self._partial + received).split(b"\n")
        for message in messages:
            kind, words = message[:1], message[1:].split()
            if kind == b"S":
                self.pid = int(words[0])
            elif kind == b"N":
                self.pid, error = None, int(words[0])
                code = 127 if error == errno.ENOENT else 126
                remedy = "; raise the limit on processes of this user (ulimit -u)" if error == errno.EAGAIN else ""
                why = f"{os.strerror(error)}{remedy}"
                self._end(code, time.monotonic(), f"could not be started: {self._program}: {why}")
            else:
                self._drain(streams)
                code = os.waitstatus_to_exitcode(int(words[0]))
                self._end(code, int(words[1]) / 1e9, reason_of(code))
        if not received:
            self._close_guard()
        return bool(received)

    def _drain(self, streams: Mapping[str, int]) -> None:
        """Read the ended rank's output from the pipes, but not to their end: other processes may keep them open."""
        for stream, fd in streams.items():
            for _ in range(_PIPE // _CHUNK):
                if not self._read(fd, stream):
                    break

    def _check_stopped(self) -> None:
        """Kill the guard, and so the rank, if the guard has been stopped; warn if the rank is stopped."""
        self._stopped_checks = self._stopped_checks + 1 if is_stopped(self._guard.pid) else 0
        if self._stopped_checks == STOPPED_CHECKS:
            log.error("the guard of rank %d (process %d) has been stopped; it is killed", self.rank, self._guard.pid)
            self._guard.kill()
        stopped = self.pid is not None and self.exit is None and is_stopped(self.pid)
        if stopped and not self._rank_stopped:
            log.warning(
                "rank %d (process %d) is stopped (SIGSTOP); the other ranks wait for it until `kill -CONT %d`",
                self.rank,
                self.pid,
                self.pid,
            )
        self._rank_stopped = stopped

    def _close_guard(self) -> None:
        """Wait for the end of the guard; if it has failed, end the processes that it should have ended."""
        try:
            code = self._guard.wait(GUARD_EXIT)
        except subprocess.TimeoutExpired:  # it has closed its end of the socket, so it has done its work
            self._guard.kill()
            code = self._guard.wait()
        if code != 0:
            self._survivors = end_family(self._family, KILL_PATIENCE)
            if self._survivors:
                log.error(
                    "rank %d survived SIGKILL (processes %s); check for uninterruptible sleep",
                    self.rank,
                    ", ".join(map(str, self._survivors)),
                )
        if self.exit is None:
            self._without_guard()

    def _without_guard(self) -> None:
        """Note the end of a rank that was killed with its guard, by its parent-death signal or by `end_family`."""
        if self.pid is None:
            self._end(126, time.monotonic(), f"could not be started: its guard ended with code {self._guard.wait()}")
            return
        if self._stopped_checks >= STOPPED_CHECKS:
            self._end(-signal.SIGKILL, time.monotonic(), "was killed because its guard process had been stopped")
        else:
            self._end(-signal.SIGKILL, time.monotonic(), "was killed together with its guard process")

    def _end(self, code: int, at: float, reason: str) -> None:
        if self._line_error is not None:
            reason = f"{OUTPUT_REFUSED}: {self._line_error}"
        self.exit = Exit(rank=self.rank, code=code, at=at, reason=reason)
        self._ended.set()
        if self._on_exit is not None:
            self._on_exit(self)


def _comma(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
