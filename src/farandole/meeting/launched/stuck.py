"""Members of an elastic job that are stuck while others wait for them, once no launcher asks after them.

A process that is stopped, or whose Python lock is held for ever, answers no handshake, although its kernel accepts
connections. Who waits for it ends it, so that its end is known to all."""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Mapping
from datetime import timedelta

from farandole.errors import FarandoleError
from farandole.meeting.dialer import dial
from farandole.meeting.frames import Deadline

__all__ = ["FAMILY", "StuckMembers", "end_here", "is_below_launcher", "is_stopped", "is_stopped_here", "state_of"]

log = logging.getLogger(__name__)

LOOKS, ANSWER = 3, 0.5  # calls without an answer before a member is silent, and the seconds that each waits for one
# Seconds of silence after which a member is stuck that is not stopped: a call in C may hold Python's lock, or the
# machine be busy.
BUSY = 10.0
FAMILY = "FARANDOLE_FAMILY"  # the variable, which a rank that the launcher starts and all its descendants inherit
CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")


class StuckMembers:
    """Watch of member `me` over the others; `secret` is that of their job."""

    def __init__(self, me: int, secret: bytes) -> None:
        self._me, self._secret = me, secret
        self._operations = -1
        self._silent: dict[int, float] = {}  # members, and the time since which they answer nothing

    def end(self, others: Mapping[int, str], operations: int) -> None:
        """End the stuck ones of `others`, given by their addresses, if they run on this machine.

        Does nothing unless this member has finished no operation since the last call: `operations` counts them. Blocks
        up to 1.5 s for each silent one; one that is not stopped has to be silent for 10 s."""
        waits, self._operations = operations == self._operations, operations
        if not waits:
            self._silent.clear()
        for number, address in others.items() if waits else ():
            began = time.monotonic()
            if not self._is_silent(address) or not _processes_of(number, self._secret):
                self._silent.pop(number, None)
                continue
            silence = time.monotonic() - self._silent.setdefault(number, began)
            if silence < BUSY and not is_stopped_here(number, self._secret):
                continue
            text = "member %d is lost: it gave no sign of life for %.2g s while others waited: it is stuck"
            log.warning(text, number, silence)
            end_here(number, self._secret)

    def _is_silent(self, address: str) -> bool:
        for _ in range(LOOKS):
            began = time.monotonic()
            try:
                me = f"member {self._me}".encode()
                sock, _ = dial(address, self._secret, me=me, deadline=Deadline(timedelta(seconds=ANSWER)))
            except TimeoutError:
                if time.monotonic() - began > 2 * ANSWER:
                    return False  # this process was stopped itself, or the machine is too busy to tell
            except (OSError, FarandoleError):
                return False  # it has ended
            else:
                sock.close()
                return False
        return True


def end_here(number: int, secret: bytes) -> None:
    """Kill the processes of the member `number` on this machine, also stopped ones."""
    for pid in _processes_of(number, secret):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_stopped_here(number: int, secret: bytes) -> bool:
    """Return whether a process of the member `number` on this machine is stopped."""
    return any(map(is_stopped, _processes_of(number, secret)))


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped, by SIGSTOP or a debugger, or frozen with its control group."""
    return state_of(pid) in ("T", "t") or _is_frozen(pid)


def is_below_launcher() -> bool:
    """Return whether farandole's launcher, on this host or by its agent, has started this process, and watches it."""
    return FAMILY in os.environ


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process; "" when it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]
    return ""


def _is_frozen(pid: int) -> bool:
    """Return whether the control group of a process is frozen, in the second version of cgroups."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cgroup") as listing:
        group = next((line[3:].strip() for line in listing if line.startswith("0::")), "")
        for root in CGROUPS:
            # The group of all processes has no such file.
            with contextlib.suppress(OSError), open(f"{root}{group}/cgroup.events") as events:
                return "frozen 1\n" in events
    return False


def _processes_of(number: int, secret: bytes) -> list[int]:
    """Return the processes of this user on this machine that are a member's, its guard among them, by variables."""
    entries, found = {f"FARANDOLE_MEMBER={number}", f"FARANDOLE_MEMBER_SECRET={secret.hex()}"}, []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        # A process may end meanwhile, or belong to another user.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environment:
            if entries <= set(environment.read().decode(errors="replace").split("\0")):
                found.append(int(pid))
    return found
