"""Processes of one rank, found by a word in their environment, whoever their parents are."""

import contextlib
import os
import secrets
import signal
import time

from farandole.meeting.launched.stuck import FAMILY, state_of

LOOK_AGAIN = 0.02  # seconds


def new_family() -> str:
    """Return a random word for one rank's processes; it is not a secret."""
    return secrets.token_hex(8)


def members(word: str) -> list[int]:
    """Return the running processes of this user that have inherited `word`."""
    entry, found = f"{FAMILY}={word}".encode(), []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        # A process may end meanwhile, or belong to another user.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environment:
            if entry in environment.read().split(b"\0") and state_of(int(pid)) not in ("Z", "X", ""):
                found.append(int(pid))
    return found


def end_family(word: str, patience: float) -> list[int]:
    """Kill all processes of a family, also those that they start meanwhile; return what survived `patience` seconds."""
    give_up = time.monotonic() + patience
    while left := members(word):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= give_up:
            return left
        time.sleep(LOOK_AGAIN)
    return []
