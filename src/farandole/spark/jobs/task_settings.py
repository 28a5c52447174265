"""Settings of the tasks that run an estimator's ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from pyspark.resource import ResourceProfile

from farandole.config import Config
from farandole.spark.driver.log import Show


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """Settings of the tasks that run ranks; the defaults are those of the session and the environment."""

    profile: ResourceProfile | None = None  # resources of each task; None: those of the configuration
    ranks_per_task: int = 1
    executable: str = ""  # the ranks' Python; "": that of the session's workers
    start_timeout: timedelta | None = None  # None: FARANDOLE_START_TIMEOUT
    show: Show | None = None  # receives the ranks' output; None: the console
    shows_lines: bool | None = None  # show all lines of the ranks; None: as the estimator's `verbose` says
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def patience(self) -> timedelta:
        """The longest wait for tasks and ranks to start."""
        return Config.from_environment().start_timeout if self.start_timeout is None else self.start_timeout
