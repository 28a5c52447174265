"""All monitors of one rank's engines, started and ended together."""

import logging
from functools import partial
from typing import TYPE_CHECKING

from farandole._native import Engine
from farandole.config import Config
from farandole.core.monitoring.metrics import Metrics
from farandole.core.monitoring.stalls import StallInspector
from farandole.core.monitoring.timeline import Timeline
from farandole.topology import Topology

if TYPE_CHECKING:
    from farandole.core.autotune.tuner import Tuner

__all__ = ["Monitors", "warn_of_idle"]

log = logging.getLogger(__name__)

DYNAMIC = "DYNAMIC"  # Horovod's word for a timeline that a later call starts


class Monitors:
    """The timeline, the stall inspector, the metrics and on rank 0 autotune, of one rank.

    Making one opens the files that the settings name; raises `ConfigError` when one cannot be written, is no log of
    autotune, or when that lacks a package."""

    def __init__(self, rank: int, size: int, host: str, config: Config) -> None:
        self.timeline, self.metrics, self._stalls = Timeline(rank, size, host), Metrics(), StallInspector(config)
        self._tuner = _make_tuner(config) if config.autotune and rank == 0 else None
        if config.timeline not in (None, DYNAMIC):
            try:
                self.timeline.start(config.timeline, mark_plans=config.timeline_mark_cycles)
            except BaseException:
                self.quiet()
                raise

    def follow(self, engine: Engine, rank: int, process_set: str = "") -> None:
        """Look at `engine` from now on, in which this rank has the number `rank`."""
        self.timeline.follow(engine, f"{process_set}: " if process_set else "")
        self.metrics.follow(engine)
        if rank == 0:
            self._stalls.follow(engine, process_set)

    def tune(self, engine: Engine, topology: Topology, largest_slot: int) -> None:
        """Look for good knobs of `engine`, the job's, if that is asked for and this is rank 0."""
        if self._tuner is not None:
            self._tuner.start(engine, topology, largest_slot, partial(self.timeline.show, "knobs"))

    def leave(self, engine: Engine) -> None:
        """Look at `engine` no longer. Idempotent."""
        self.timeline.leave(engine)
        self.metrics.leave(engine)
        self._stalls.leave(engine)

    def quiet(self) -> None:
        """Warn of no stalls and turn no knobs any more: the engines are about to stop. Idempotent."""
        if self._tuner is not None:
            self._tuner.close()
        self._stalls.close()

    def close(self) -> None:
        """Stop looking, and complete the timeline's file. Idempotent."""
        self.quiet()
        self.timeline.close()


def _make_tuner(config: Config) -> "Tuner":
    # Here, as few jobs ask for it, and its modules take as long to load as the rest of the core.
    from farandole.core.autotune.tuner import Tuner

    return Tuner(config)


def warn_of_idle(config: Config) -> None:
    """Warn of settings of autotune that are given while `autotune` itself is not."""
    names = [each.name for each in config.settings() if each.name.startswith("autotune_")]
    idle = [name for name in names if not config.leaves_free(name)]
    if idle and config.leaves_free("autotune"):
        log.warning("without autotune these settings do nothing: %s; set FARANDOLE_AUTOTUNE=1, too", ", ".join(idle))
