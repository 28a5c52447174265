"""What a test may leave behind: nothing."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from helpers.programs import outliving

__all__ = ["Snapshot"]

PATIENCE = (
    10.0  # seconds: a busy machine's kernel and the interpreter take a moment to end a thread, a child, a connection
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What this process holds at one moment that outlives a function."""

    threads: frozenset[str]
    children: frozenset[str]  # process ids
    descriptors: frozenset[str]
    environment: dict[str, str]

    @classmethod
    def take(cls) -> Self:
        """Look at the process as it is now."""
        return cls(
            threads=frozenset(_threads()),
            children=frozenset(_children()),
            descriptors=frozenset(_descriptors()),
            # pytest itself writes its variable anew in each phase of a test.
            environment={name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        )

    def leaks(self, *, shared_session: bool) -> list[str]:
        """Name what is new since this snapshot, after waiting a moment for what is about to end.

        With `shared_session` only the environment counts: a Spark session that several tests share opens
        connections and starts threads whenever it likes."""
        if not self._compare(Snapshot.take(), shared_session):
            return []
        # A caught exception and the frame it came from refer to each other, and hold what the frame held.
        gc.collect()
        deadline = time.monotonic() + PATIENCE
        while (found := self._compare(Snapshot.take(), shared_session)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    def _compare(self, now: "Snapshot", shared_session: bool) -> list[str]:
        names = sorted(self.environment.keys() | now.environment.keys())
        # The value is left out: it may be a secret.
        found = [f"environment: {each}" for each in names if self.environment.get(each) != now.environment.get(each)]
        if not shared_session:
            found += [f"thread: {each}" for each in sorted(now.threads - self.threads)]
            found += [f"child process: {each} {_command(each)}" for each in sorted(now.children - self.children)]
            found += [f"file descriptor: {each}" for each in sorted(now.descriptors - self.descriptors)]
        return found


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        # Python keeps what it made up for a framework's thread that once ran Python, until the interpreter ends.
        if isinstance(thread, threading._DummyThread):
            continue
        yield f"{thread.name} ({thread.native_id})"
    # Threads of the native core are unknown to Python; their names tell them from those of BLAS and OpenMP.
    for task in Path("/proc/self/task").iterdir():
        name = _read(task / "comm")
        if name.startswith("farandole"):
            yield f"{name} (native {task.name})"


def _children() -> Iterator[str]:
    shared = outliving()
    for task in Path("/proc/self/task").iterdir():
        yield from set(_read(task / "children").split()) - shared


def _command(pid: str) -> str:
    return _read(Path("/proc", pid, "cmdline")).replace("\0", " ")[:200] or "(ended, not waited for)"


def _descriptors() -> Iterator[str]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        if target.startswith("socket:") or "farandole" in target.rpartition("/")[2]:
            yield f"{entry.name} {target}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # ended between the listing and now
