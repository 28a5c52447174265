"""Connections of the driver's log to the tasks and keepers of a job, and the job as these connections see it."""

import contextlib
import socket
import threading
from collections.abc import Callable

from farandole.launch.failures import Failure
from farandole.meeting.frames import send
from farandole.spark.driver.relay import Met, Over


class Peer:
    """Connection of a rank's task, or of a keeper with the name of its host; any thread may send on it."""

    def __init__(self, connection: socket.socket, *, rank: int = -1, host: str | None = None) -> None:
        self.connection, self.rank, self.host = connection, rank, host
        self._sending = threading.Lock()

    @property
    def is_keeper(self) -> bool:
        """Return whether the other end is a keeper of dealt rows. If not, it is the task of `rank`."""
        return self.host is not None

    def __str__(self) -> str:
        return f"the keeper on {self.host}" if self.is_keeper else f"rank {self.rank}"

    def send(self, message: Met | Over) -> None:
        """Send `message`, unless the other end has gone."""
        with self._sending, contextlib.suppress(OSError):
            send(self.connection, message)

    def dismiss(self, reason: str) -> None:
        """Make the other end finish: a task ends its rank, a keeper its process."""
        self.send(Over(reason))


class Job:
    """Interface by which the driver's log asks about Spark's job and reports to it; threads of connections call it.

    This class is for a job whose stage Spark does not repeat, and which needs no reports."""

    repeats = False  # whether Spark may run the stage again, whose ranks then ask for their rows again

    def attempt_of(self, stage: int) -> int:
        """Return Spark's number of the stage's newest attempt, from 1; 0 if it is not known."""
        return 0

    def on_attempt(self, number: int, failed: Failure | None) -> None:
        """Handle the first connection of a task of attempt `number`; `failed` has ended the attempt before it."""

    def on_failure(self, stage: int, number: int, failure: Failure, culprit: Callable[[], Failure | None]) -> None:
        """Handle the failure of a rank in attempt `number`; `culprit` returns the one that has ended the attempt."""

    def on_keeper(self) -> None:
        """Handle the connection of a keeper."""

    def on_lost_keeper(self, *, begun: bool) -> None:
        """Handle the early end of a keeper; `begun`: some rank has its rows already."""
