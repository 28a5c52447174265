"""Attempts of a stage and failures of its ranks, as the ranks' tasks report them to the driver."""

import functools
import threading
from collections import Counter

from farandole.launch.failures import Failure, culprit
from farandole.spark.driver.peers import Job, Peer

VANISHED = (
    "its Spark task ended without a report: its executor or its connection to the driver was lost, or its Python "
    "process was killed (the system's out-of-memory killer does that); see the executor's log"
)


class Failures:
    """Failures of a job's ranks by attempt of the stage; `changed` is notified of each."""

    def __init__(self, job: Job, changed: threading.Condition) -> None:
        self._job, self._changed = job, changed
        self._reported: list[tuple[int, Failure]] = []  # each with its attempt
        self._newest = 0  # the newest attempt of which a task has connected
        self._begun: Counter[int] = Counter()  # how often a task of each rank has connected
        self._tasks: dict[Peer, tuple[int, int]] = {}  # stage and attempt of a task that has not ended
        self._vanished: list[tuple[int, int]] = []  # attempt and rank of tasks that ended without a report

    @property
    def newest(self) -> list[Failure]:
        """The failures of the newest attempt so far, in the order in which they were reported."""
        with self._changed:
            return self._of(self._newest)

    def culprit(self, attempt: int) -> Failure | None:
        """Return the failure that ended an attempt; None if none is known.

        A task that has ended without a report comes before tasks that only lost it."""
        with self._changed:
            failures = self._of(attempt)
            gone = [rank for number, rank in self._vanished if number == attempt]
        reported = culprit(failures) if failures else None
        if gone and (reported is None or reported.consequence):
            return Failure(rank=gone[0], reason=VANISHED, code=1, killed=True)
        return reported

    def begin(self, task: Peer, stage: int) -> None:
        """Determine the attempt of the stage to which a task belongs; tasks do not know it."""
        known = self._job.attempt_of(stage)
        with self._changed:
            self._begun[task.rank] += 1
            # Spark's number may lag behind. A rank has one task in each attempt.
            attempt = max(known, self._begun[task.rank])
            self._tasks[task] = stage, attempt
            newer, self._newest = attempt > self._newest, max(attempt, self._newest)
        if newer:
            self._job.on_attempt(attempt, self.culprit(attempt - 1))

    def end(self, task: Peer) -> None:
        """Note that a task has ended well."""
        with self._changed:
            self._tasks.pop(task, None)

    def add(self, task: Peer, failure: Failure) -> None:
        """Note the failure that ended a task."""
        with self._changed:
            stage, attempt = self._tasks.pop(task, (-1, self._newest))
            self._reported.append((attempt, failure))
            self._changed.notify_all()
        self._job.on_failure(stage, attempt, failure, functools.partial(self.culprit, attempt))

    def vanish(self, task: Peer) -> None:
        """Note that a task has disconnected; without a report before, it is lost."""
        with self._changed:
            if task in self._tasks:
                self._vanished.append((self._tasks.pop(task)[1], task.rank))

    def _of(self, attempt: int) -> list[Failure]:
        return [failure for number, failure in self._reported if number == attempt]
