"""Lock of a run in its store: at most one fit at a time writes the run's checkpoints."""

import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType

from farandole.errors import ConfigError
from farandole.estimators.store import FilesystemStore

log = logging.getLogger(__name__)

BEAT = timedelta(seconds=10)  # between two renewals by the owner
PATIENCE = timedelta(seconds=60)  # for a sign of life of an owner elsewhere
LOOK = timedelta(seconds=1)  # between two looks for it


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process whose fit has locked a run; the content of the lock file."""

    token: str
    host: str
    pid: int
    since: str  # local time with its zone
    machine: str  # equal for processes that see each other's ids
    born: str  # the process's start, in the clock of its machine
    beats: int = 0  # renewals

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def is_here(self) -> bool:
        """Return whether this process could see the owner."""
        return self.machine == _machine()

    @property
    def is_dead(self) -> bool:
        """Return whether the owner has ended; only for owners that are here."""
        return _born(self.pid) != self.born


class RunLock:
    """Lock of the run in `folder`: the file `lock`, which names its owner; a context that yields the owner's token.

    The owner renews the file every 10 s on a thread. The lock of a dead process of this machine is taken over at once;
    that of a process of another machine if it is not renewed within 60 s, for which the start blocks. Raises
    `ConfigError` if the owner lives. Stores cannot lock in one step, so rank 0 calls `require_owner` before it writes.
    """

    def __init__(self, store: FilesystemStore, folder: str) -> None:
        self._store, self._folder = store, folder
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        self._owner = Owner(
            token=secrets.token_hex(8), host=socket.gethostname(), pid=os.getpid(), since=now, machine=_machine(),
            born=_born(os.getpid()),
        )  # fmt: skip
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="farandole-run-lock", daemon=True)

    def __enter__(self) -> str:
        other = _read(self._store, self._folder)
        if other is not None:
            self._require_dead(other)
            log.warning("%s was locked by %s, which has ended; this fit goes on", self._folder, other)
        self._write()
        require_owner(self._store, self._folder, self._owner.token)
        self._thread.start()
        return self._owner.token

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(PATIENCE.total_seconds())
        try:
            if self._is_own():
                self._store.remove(_path(self._folder))
        except Exception:  # the fit itself has ended as it should
            log.exception("%s cannot be removed; remove it before the next fit", _path(self._folder))

    def _require_dead(self, other: Owner) -> None:
        if other.is_here:
            if not other.is_dead:
                raise _taken(self._folder, other)
            return
        log.warning(
            "%s is locked by %s; waiting up to %s s for its sign of life", self._folder, other, PATIENCE.seconds
        )
        give_up = time.monotonic() + PATIENCE.total_seconds()
        while time.monotonic() < give_up:
            time.sleep(LOOK.total_seconds())
            now = _read(self._store, self._folder)
            if now is None:
                return
            if now != other:
                raise _taken(self._folder, now)

    def _renew(self) -> None:
        while not self._ended.wait(BEAT.total_seconds()):
            try:
                if not self._is_own():
                    return
                self._owner = replace(self._owner, beats=self._owner.beats + 1)
                self._write()
            except Exception:
                log.exception("the lock of %s cannot be renewed; the next try follows", self._folder)

    def _is_own(self) -> bool:
        found = _read(self._store, self._folder)
        return found is not None and found.token == self._owner.token

    def _write(self) -> None:
        self._store.write(_path(self._folder), json.dumps(asdict(self._owner)).encode())


def require_owner(store: FilesystemStore, folder: str, token: str) -> None:
    """Raise `ConfigError` if another fit than that of `token` has locked the run in `folder`; "" stands for no fit."""
    owner = _read(store, folder) if token else None
    if owner is not None and owner.token != token:
        raise _taken(folder, owner)


def _read(store: FilesystemStore, folder: str) -> Owner | None:
    content = store.read(_path(folder))
    if content is None:
        return None
    try:
        return Owner(**json.loads(content))
    except (ValueError, TypeError) as error:
        problem = f"{_path(folder)} is no lock of a fit; remove it if no fit of this run is going on"
        raise ConfigError("run_id", problem) from error


def _path(folder: str) -> str:
    return f"{folder}/lock"


def _taken(folder: str, owner: Owner) -> ConfigError:
    remedy = "wait for its end, or name another run"
    return ConfigError("run_id", f"the run in {folder} belongs to a fit of {owner}, which is going on: {remedy}")


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _born(pid: int) -> str:
    """Return when a process of this machine began, in the kernel's ticks; "" if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]
