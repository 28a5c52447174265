"""Jobs that have lost their launcher, and the launcher that takes one over."""

import contextlib
import json
import logging
import os
import secrets
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from farandole.errors import ConfigError
from farandole.launch.backend import OnEnd, OnLine
from farandole.launch.failures import Failure
from farandole.launch.lines import LineSplitter
from farandole.launch.survivors import END
from farandole.meeting.handshake import new_secret

STATE = "~/.local/state/farandole"  # on each host, for the output of ranks that survive their launcher
FILE = "launcher"
LOOK_EVERY = 0.1  # seconds between two looks at a member's output
LAST_WORD = 2.0  # seconds from a process's end to the end of its connection

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Record:
    """What a launcher notes for its successor: a file of the job's folder that only the user can read."""

    name: str = field(default_factory=lambda: secrets.token_hex(4))
    secret: bytes = field(default_factory=new_secret, repr=False)
    addresses: dict[str, int] = field(default_factory=dict)  # ports at which the launcher listens
    members: dict[int, tuple[str, int]] = field(default_factory=dict)  # host and slot of each that was started

    @property
    def folder(self) -> str:
        """The job's folder on each host, below the user's home."""
        return f"{STATE}/{self.name}"

    @property
    def _file(self) -> Path:
        return _expanded(self.folder) / FILE

    @classmethod
    def find(cls, name: str) -> "Record":
        """Read the record of the job `name`, or of the newest one for "last"; raises `ConfigError` without any."""
        pattern = f"{'*' if name == 'last' else name}/{FILE}"
        files = sorted(_expanded(STATE).glob(pattern), key=lambda file: file.stat().st_mtime)
        if not files:
            raise ConfigError("join", f"no job {name!r} has lost its launcher here; {STATE} has a folder for each")
        said = json.loads(files[-1].read_text())
        members = {int(number): (host, slot) for number, (host, slot) in said["members"].items()}
        return cls(files[-1].parent.name, bytes.fromhex(said["secret"]), said["addresses"], members)

    def write(self) -> None:
        """Replace the file; raises `ConfigError` if the folder cannot be written to."""
        said = {"secret": self.secret.hex(), "addresses": self.addresses, "members": self.members}
        new = self._file.with_suffix(".new")
        try:
            new.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(said, file)
            new.replace(self._file)
        except OSError as error:
            raise ConfigError("survive_launcher", f"the job's folder cannot be written: {error}; set HOME") from error

    def remove(self) -> None:
        """Remove the file and what members have noted of their ends, and the folder unless it has output of members."""
        with contextlib.suppress(OSError):  # it could not be written either
            self._file.unlink()
            for end in self._file.parent.glob(f"*{END}"):
                end.unlink()
        with contextlib.suppress(OSError):
            self._file.parent.rmdir()


def _expanded(folder: str) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise ConfigError("survive_launcher", f"{folder} needs a home: this user has none; set HOME") from error


def end_without_launcher(number: int, code: int | None) -> Failure | None:
    """Return the failure of a member of a lost launcher that has not called, None if it has ended well."""
    if code is None:
        return Failure(rank=number, reason="it did not call the new launcher", code=1, killed=True)
    log.warning("member %d has ended with code %d while there was no launcher", number, code)
    reason = f"it has ended with code {code} while there was no launcher"
    return Failure(rank=number, reason=reason, code=code) if code else None


class Adopted:
    """A member that an earlier launcher has started.

    One of this machine is followed by its process, its output by the file `log`; one of another host by its connection
    alone: `leave` tells of its end."""

    def __init__(
        self, number: int, pid: int | None, log: str, on_line: OnLine, on_end: OnEnd, ask_to_leave: Callable[[], object]
    ) -> None:
        self.rank = number
        self._log, self._on_line, self._on_end, self._ask_to_leave = (
            Path(log).expanduser(),
            on_line,
            on_end,
            ask_to_leave,
        )
        self._shown = self._log.stat().st_size if self._log.exists() else 0
        self._lines = LineSplitter()
        self._process = None if pid is None else os.pidfd_open(pid)
        self._kill_at, self._closing = float("inf"), threading.Lock()
        self._left, self._gone, self._well = threading.Event(), threading.Event(), False
        threading.Thread(target=self._follow, name=f"farandole-adopted-{number}", daemon=True).start()

    def leave(self, well: bool) -> None:
        """Note the end of the member's connection, and whether its program has said that it has ended well."""
        self._well = well
        self._left.set()

    def terminate(self, grace: timedelta) -> None:
        """Send SIGTERM, and SIGKILL after `grace`; ask a member of another host to leave. Does not wait."""
        if self._process is None:
            self._ask_to_leave()
            return
        self._kill_at = min(self._kill_at, time.monotonic() + grace.total_seconds())
        self._signal(signal.SIGTERM if grace else signal.SIGKILL)

    def wait_gone(self, timeout: timedelta) -> bool:
        """Wait until the member has ended; False after `timeout`."""
        return self._gone.wait(timeout.total_seconds())

    def value(self) -> NoReturn:
        """Raise `NotImplementedError`: calls end with their launcher."""
        raise NotImplementedError("a call does not outlive its launcher")

    def _signal(self, number: int) -> None:
        with self._closing, contextlib.suppress(ProcessLookupError):  # it has ended
            if self._process is not None and not self._gone.is_set():
                signal.pidfd_send_signal(self._process, number)

    def _follow(self) -> None:
        ended = False
        while not ended:
            ended = self._has_ended()
            if time.monotonic() >= self._kill_at:
                self._signal(signal.SIGKILL)
            self._show()
        self._left.wait(LAST_WORD)
        with self._closing:
            self._gone.set()
            if self._process is not None:
                os.close(self._process)
        lost = Failure(rank=self.rank, reason="its process has ended without a word", code=1, killed=True)
        self._on_end(self.rank, None if self._well else lost)

    def _has_ended(self) -> bool:
        """Wait a moment for the end; return whether it has come."""
        if self._process is None:
            return self._left.wait(LOOK_EVERY)
        return bool(select.select([self._process], [], [], LOOK_EVERY)[0])

    def _show(self) -> None:
        with contextlib.suppress(FileNotFoundError), self._log.open("rb") as log:
            log.seek(self._shown)
            chunk = log.read()
            self._shown += len(chunk)
            for line in self._lines.feed(chunk):
                self._on_line(self.rank, "stdout", line)
