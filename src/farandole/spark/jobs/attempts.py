"""Attempts of a Spark job's ranks: their limit, and the choice between another attempt and an error."""

import errno
import logging
from collections.abc import Callable
from typing import TypeVar

from farandole.errors import ConfigError, DataError, RankFailed, SourceError
from farandole.launch.failures import Failure
from farandole.spark.driver.log import OnMessage
from farandole.spark.rows.exchange.access import RowsLost

log = logging.getLogger(__name__)

T = TypeVar("T")

_FULL = {errno.ENOSPC, errno.EDQUOT}  # an epoch is progress, but its checkpoint finds no room in any attempt
_SIGNALLED = 128  # codes above are those of processes that a signal has ended


class Attempts:
    """Counter of a run's attempts, at most `most`, over all of its Spark jobs.

    Spark itself repeats a failed stage, and shows each attempt. Another Spark job follows when Spark gives up the stage
    (spark.stage.maxConsecutiveAttempts), and when dealt rows are lost. An attempt that could not read its rows does not
    count. Lost rows are an error once there have been `dealings` Spark jobs, or `most` if that is more."""

    def __init__(self, most: int, dealings: int) -> None:
        self.most, self._dealings = most, max(most, dealings)
        self.refused: Failure | None = None  # the failure after which Spark began an attempt too many
        self._before = 0  # attempts of the Spark jobs that have ended
        self._number = 0  # of the newest attempt, from 1
        self._failures: dict[int, str] = {}  # by attempt
        self._farthest = -1.0  # the last epoch or step that any attempt has reported
        self._advanced = False  # the newest attempt has got further than those before it
        self._final = False

    @property
    def earlier(self) -> list[str]:
        """The failures of the attempts before the newest one."""
        return [self._failures.get(number, "see Spark's UI for the reason") for number in range(1, self._number)]

    @property
    def _over(self) -> bool:
        return self._final or self._number >= self.most

    def begin(self, stage_attempt: int, failed: Failure | None) -> bool:
        """Count attempt `stage_attempt` (from 1) of the Spark job; `failed` is the failure that ended the one before.

        Returns whether it may go on: the limit allows it, and `failed` is no failure that ends the run. Spark may
        begin another attempt after such a failure before it is told to cancel the job."""
        number = self._before + stage_attempt
        ended = self._final and failed is not None and not self.go_on(failed)
        if ended or number > self.most:
            self._final, self.refused = True, failed
            return False
        if number > self._number:
            self._number, self._advanced = number, False
        if failed is not None:
            self._failures[number - 1] = f"rank {failed.rank} failed: {failed.reason}"
        if stage_attempt > 1:
            log.warning("%s; attempt %d of %d begins", self.earlier[-1], number, self.most)
        return True

    def watching(self, on_message: OnMessage | None) -> OnMessage:
        """Return a handler of messages that notes the finished epochs, and calls `on_message`."""

        def handle(rank: int, message: dict[str, object]) -> None:
            if message["kind"] == "epoch":
                place = message.get("epoch", message.get("step"))
                assert isinstance(place, (int, float)), message
                self.progress(place)
            if on_message is not None:
                on_message(rank, message)

        return handle

    def progress(self, place: float) -> None:
        """Note that the newest attempt has finished the epoch, or the step, with the number `place`."""
        if place > self._farthest:
            self._farthest, self._advanced = place, True

    def go_on(self, failure: Failure) -> bool:
        """Return whether Spark may repeat the stage after `failure`, which has ended the newest attempt.

        It may after a lost rank and after an error of the network. An exception or an exit of the user's code comes
        again: it ends the run unless this attempt has got further than those before it. A `ConfigError`, a `DataError`
        and a full disk always do. After lost rows Spark must not repeat the stage: they need another Spark job."""
        if isinstance(failure.cause, RowsLost):
            return False
        is_lost = failure.killed or failure.consequence or failure.code > _SIGNALLED
        may_pass = is_lost or isinstance(failure.cause, (ConnectionError, TimeoutError))
        is_full = isinstance(failure.cause, OSError) and failure.cause.errno in _FULL
        lasts = is_full or isinstance(failure.cause, (ConfigError, DataError))
        self._final = lasts or not (may_pass or self._advanced)
        return not self._over

    def run(self, job: Callable[[], T]) -> T:
        """Call `job`, which runs one Spark job, until it succeeds; raises its error if no attempt is left."""
        jobs = 0
        while True:
            jobs += 1
            try:
                return job()
            except RowsLost as lost:
                self._number = max(self._before, self._number - 1)
                if self._over or jobs >= self._dealings:
                    raise SourceError(lost.path, lost.problem) from lost.__cause__
                log.warning("%s are lost; they are dealt again (Spark job %d of %d)", lost.path, jobs, self._dealings)
            except RankFailed as failed:
                # If no task has reached the driver, as when executors lack farandole, Spark has tried often enough.
                if self._over or self._number == self._before:
                    raise
                self._failures[self._number] = f"rank {failed.rank} failed: {failed.reason}"
                log.warning(
                    "rank %d failed: %s; another Spark job follows, with attempt %d of %d",
                    failed.rank, failed.reason, self._number + 1, self.most,
                )  # fmt: skip
            self._before = self._number
