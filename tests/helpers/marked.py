"""Processes with a mark in their environment, by which a test finds all that it has started."""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


def processes_with(mark: str) -> list[str]:
    """Return the command lines of all other processes that have `mark` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue  # it has ended
    return found


def wait_until_gone(mark: str, seconds: float) -> list[str]:
    """Wait until no process has `mark`; return the command lines of those left after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@contextmanager
def running(
    words: Sequence[str], env: Mapping[str, str], mark: str, *, cwd: Path | None = None, stderr: int = subprocess.PIPE
) -> Iterator["subprocess.Popen[str]"]:
    """Run a command with variables and `mark`; kill it at the end of the block, and check that its children end."""
    with subprocess.Popen(
        words, env={**os.environ, **env, "MARK": mark}, cwd=cwd, stdout=subprocess.PIPE, stderr=stderr, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
    assert wait_until_gone(mark, 20.0) == []


def wait_for_ranks(process: "subprocess.Popen[str]", folder: Path, count: int) -> None:
    """Wait until `count` ranks of the process have written files "rank*"; remove the files."""
    deadline = time.monotonic() + 150.0
    while len(found := list(folder.glob("rank*"))) < count:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"{len(found)} of {count} ranks: {process.communicate()}")
        time.sleep(0.05)
    for each in found:
        each.unlink()
