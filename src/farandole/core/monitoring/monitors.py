"""All monitors of one rank's engines, which start and end together."""

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from farandole._native import Engine
from farandole.config import Config
from farandole.core.autotune.knobs import Knobs
from farandole.core.monitoring.metrics import Metrics
from farandole.core.monitoring.stalls import StallInspector
from farandole.core.monitoring.stopped import StoppedRanks
from farandole.core.monitoring.timeline import Timeline
from farandole.timeline.files import DYNAMIC
from farandole.topology import Topology

if TYPE_CHECKING:
    from farandole.core.autotune.tuner import Tuner

log = logging.getLogger(__name__)


class Monitors:
    """Timeline, stall inspector and metrics of one rank, watch over others of its host, and autotune on rank 0.

    The constructor opens the files that `config` names; each generation of an elastic job has a timeline of its own. It
    raises `ConfigError` if a file cannot be written, if `autotune_log` is not a log of autotune, or if autotune lacks a
    package."""

    def __init__(self, rank: int, size: int, host: str, config: Config, generation: int = 0) -> None:
        self.timeline = Timeline(rank, size, host, generation)
        self.metrics, self._stalls = Metrics(), StallInspector(config)
        self._watches_host, self._stopped = config.stall_seconds > 0, StoppedRanks({})
        self._tuner = _make_tuner(config) if config.autotune and rank == 0 else None
        if config.timeline is not None and config.timeline != DYNAMIC:
            try:
                self.timeline.start(config.timeline, mark_plans=config.timeline_mark_cycles)
            except BaseException:
                self.quiet()
                raise

    def follow(self, engine: Engine, rank: int, process_set: str = "") -> None:
        """Monitor `engine`, in which this rank has the number `rank`."""
        self.timeline.follow(engine, f"{process_set}: " if process_set else "")
        self.metrics.follow(engine)
        if rank == 0:
            self._stalls.follow(engine, process_set)

    def watch(self, processes: Mapping[int, int]) -> None:
        """Warn if one of the `processes` of this host, by rank, is stopped; called once."""
        if self._watches_host:
            self._stopped = StoppedRanks(processes)

    def tune(self, engine: Engine, topology: Topology, knobs: Knobs, largest_slot: int) -> None:
        """Start autotune of `engine`, the job's engine, which has `knobs`, if it is set and this is rank 0."""
        if self._tuner is not None:
            self._tuner.start(engine, topology, knobs, largest_slot, partial(self.timeline.show, "knobs"))

    def leave(self, engine: Engine) -> None:
        """Stop monitoring `engine`. Idempotent."""
        self.timeline.leave(engine)
        self.metrics.leave(engine)
        self._stalls.leave(engine)

    def quiet(self) -> None:
        """End warnings of stalls and stopped ranks, and autotune, because the engines are about to stop. Idempotent."""
        if self._tuner is not None:
            self._tuner.close()
        self._stalls.close()
        self._stopped.close()

    def close(self) -> None:
        """End all monitors, and complete the timeline's file. Idempotent."""
        self.quiet()
        self.timeline.close()


def _make_tuner(config: Config) -> "Tuner":
    # Imported here, because few jobs use it, and its modules take a tenth of the time in which the core loads.
    from farandole.core.autotune.tuner import Tuner

    return Tuner(config)


def warn_of_idle(config: Config) -> None:
    """Log a warning if settings of autotune are given, but `autotune` is not."""
    names = [setting.name for setting in config.settings() if setting.name.startswith("autotune_")]
    idle = [name for name in names if not config.leaves_free(name)]
    if idle and config.leaves_free("autotune"):
        log.warning("without autotune these settings do nothing: %s; set FARANDOLE_AUTOTUNE=1, too", ", ".join(idle))
