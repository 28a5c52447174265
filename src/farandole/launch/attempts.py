"""Attempts of `farandole run --max-restarts N`: all ranks start again after a failure."""

import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from farandole.launch.backend import Task
from farandole.launch.elastic.job import ElasticJob
from farandole.launch.failures import OUTPUT_REFUSED, Failure
from farandole.launch.job import Job
from farandole.launch.output import Output
from farandole.timeline.files import DYNAMIC, restart_path

log = logging.getLogger(__name__)

# torchrun's names for the ranks' variables: the restarts before this attempt, and the most that there can be.
NUMBER, MOST = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"


class Attempts:
    """The attempts of one run: the first, and up to `restarts` further ones, each with a `timeline` of its own."""

    def __init__(self, restarts: int, timeline: str | None = None) -> None:
        self._restarts, self._timeline = restarts, timeline
        self.failures: list[Failure] = []  # one for each attempt, but not for one that ended well
        self.code = 0  # exit code of the newest attempt

    def run(
        self,
        open_attempt: Callable[[Mapping[str, str]], AbstractContextManager[Job | ElasticJob]],
        environment: Mapping[str, str],
        task: Task,
        output: Output,
    ) -> None:
        """Run `task` as jobs of `open_attempt`, called with the ranks' environment, until one ends well.

        All processes of an attempt have ended when the next begins. Lost output is final: its reader is gone."""
        for number in range(self._restarts + 1):
            own = {NUMBER: str(number), MOST: str(self._restarts)} if self._restarts else {}
            if number > 0 and self._timeline not in (None, DYNAMIC):
                own["FARANDOLE_TIMELINE"] = str(restart_path(self._timeline, number))
            with open_attempt({**environment, **own}) as job:
                if isinstance(job, ElasticJob):
                    output.rank_of = functools.partial(_rank_in, job)
                failure = job.run(task, output)
            self.code = 0 if failure is None else failure.code
            if failure is None:
                return
            self.failures.append(failure)
            if failure.reason.startswith(OUTPUT_REFUSED):
                return
            if number < self._restarts:
                log.warning(
                    "rank %d failed: %s; all ranks start again (restart %d of %d)",
                    failure.rank,
                    failure.reason,
                    number + 1,
                    self._restarts,
                )


def _rank_in(job: ElasticJob, member: int) -> int:
    """Return the rank of `member` in the newest generation of `job`; its own number if it has no place there."""
    formed = job.formed
    return formed.index(member) if member in formed else member
