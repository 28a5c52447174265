"""Processes with a word in their environment, by which a test finds all that it has started."""

import os
import time
from pathlib import Path

__all__ = ["processes_with", "wait_until_gone"]


def processes_with(mark: str) -> list[str]:
    """The command lines of all processes that have `mark` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue  # it has just ended
    return found


def wait_until_gone(mark: str, seconds: float) -> list[str]:
    """Wait until no process with `mark` is left; the ones that are still there after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
