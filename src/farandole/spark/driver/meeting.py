"""Exchange of a short text between the tasks of a stage, by way of the driver."""

import threading

from farandole.spark.driver.peers import Job, Peer
from farandole.spark.driver.relay import Met


class Meeting:
    """Collects the text of each rank, and sends all of them to every rank.

    Does so only if Spark does not repeat the stage, or has not done so yet: tasks do not know their attempt, and tasks
    of two attempts must not meet."""

    def __init__(self, job: Job, size: int) -> None:
        self._job, self._size = job, size
        self._arrived: dict[int, tuple[Peer, str]] = {}  # connection and text of each rank so far
        self._lock = threading.Lock()

    def arrive(self, task: Peer, stage: int, text: str) -> None:
        """Add the text of a rank; the last one completes the exchange."""
        with self._lock:
            self._arrived[task.rank] = task, text
            if len(self._arrived) < self._size:
                return
            met, self._arrived = self._arrived, {}
        if not self._job.repeats or self._job.attempt_of(stage) == 1:
            message = Met([met[rank][1] for rank in range(self._size)])
            for each, _ in met.values():
                each.send(message)
