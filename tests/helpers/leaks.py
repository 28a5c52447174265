"""Detection of threads, processes, descriptors and variables that a test leaves behind."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from helpers.programs import outliving

PATIENCE = 10.0  # seconds for a thread, a child or a connection to end on a busy machine


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Threads, child processes, descriptors and environment of this process at one moment."""

    threads: frozenset[str]
    children: frozenset[str]  # process ids
    descriptors: frozenset[str]
    environment: dict[str, str]

    @classmethod
    def take(cls) -> Self:
        """Return the current state of the process."""
        return cls(
            threads=frozenset(_threads()),
            children=frozenset(_children()),
            descriptors=frozenset(_descriptors()),
            # pytest changes its own variable in each phase of a test.
            environment={name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        )

    def leaks(self, *, shared_session: bool) -> list[str]:
        """Return the names of what is new since this snapshot; wait up to `PATIENCE` seconds for it to end.

        With `shared_session` only the environment counts: a Spark session that tests share may open connections and
        start threads at any time."""
        if not self._compare(Snapshot.take(), shared_session):
            return []
        # A caught exception and its frame refer to each other, and keep the frame's objects alive.
        gc.collect()
        deadline = time.monotonic() + PATIENCE
        while (found := self._compare(Snapshot.take(), shared_session)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    def _compare(self, now: "Snapshot", shared_session: bool) -> list[str]:
        names = sorted(self.environment.keys() | now.environment.keys())
        # Values are left out, because they may be secrets.
        found = [f"environment: {each}" for each in names if self.environment.get(each) != now.environment.get(each)]
        if not shared_session:
            found += [f"thread: {each}" for each in sorted(now.threads - self.threads)]
            found += [f"child process: {each} {_command(each)}" for each in sorted(now.children - self.children)]
            found += [f"file descriptor: {each}" for each in sorted(now.descriptors - self.descriptors)]
        return found


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        # Python keeps a dummy object for each foreign thread that ran Python code, until the interpreter ends.
        if isinstance(thread, threading._DummyThread):
            continue
        yield f"{thread.name} ({thread.native_id})"
    # Python does not list threads of the native core; their names distinguish them from those of BLAS and OpenMP.
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
            continue  # the descriptor of this listing
        if target.startswith("socket:") or "farandole" in target.rpartition("/")[2]:
            yield f"{entry.name} {target}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it has ended since the listing
