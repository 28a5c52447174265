"""Watch over the processes of a host's ranks, which logs a warning when one is stopped."""

import logging
import os
import socket
import struct
import threading
from collections.abc import Mapping

from farandole.meeting.launched.stuck import is_below_launcher, is_stopped
from farandole.topology import Topology

log = logging.getLogger(__name__)

LOOK_EVERY = 0.75  # seconds
LOOKS = 2  # in a row that find a process stopped: a whole job that goes on after Ctrl-Z is no news
_CREDENTIALS = struct.Struct("3i")  # of a peer: process, user, group


def watched_processes(topology: Topology, companions: Mapping[int, socket.socket]) -> dict[int, int]:
    """Return the processes that this rank watches, by rank; `companions` are connections within its host.

    The first rank of a host watches all others, the second one the first. Below farandole's own launcher, which watches
    its ranks itself, there are none."""
    if is_below_launcher() or topology.local_rank > 1:
        return {}
    sizes = socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    found = {rank: _CREDENTIALS.unpack(sock.getsockopt(*sizes))[0] for rank, sock in companions.items()}
    # Process 0 is one of another container, which this one does not see.
    return {rank: process for rank, process in found.items() if process not in (0, os.getpid())}


class StoppedRanks:
    """Thread that looks at `processes` of this host, by rank, from the constructor to `close`."""

    def __init__(self, processes: Mapping[int, int]) -> None:
        self._processes = processes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farandole-stopped", daemon=True)
        if processes:
            self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        looks = dict.fromkeys(self._processes, 0)
        while not self._stop.wait(LOOK_EVERY):
            for rank, process in self._processes.items():
                looks[rank] = looks[rank] + 1 if is_stopped(process) else 0
                if looks[rank] == LOOKS:
                    text = "rank %d (process %d on %s) is stopped; the other ranks wait for it until `kill -CONT %d`"
                    log.warning(text, rank, process, socket.gethostname(), process)
