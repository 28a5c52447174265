"""All that looks at the engines of one rank while they work."""

from farandole._native import Engine
from farandole.config import Config
from farandole.core.metrics import Metrics
from farandole.core.stalls import StallInspector
from farandole.core.timeline import Timeline

__all__ = ["Watch"]

DYNAMIC = "DYNAMIC"  # Horovod's word for a timeline that a later call starts


class Watch:
    """The timeline, the stall inspector and the metrics of one rank.

    Making one opens the timeline's file if the settings name one; raises `ConfigError` when it cannot be written."""

    def __init__(self, rank: int, size: int, host: str, config: Config) -> None:
        self.timeline, self.metrics, self._stalls = Timeline(rank, size, host), Metrics(), StallInspector(config)
        if config.timeline not in (None, DYNAMIC):
            self.timeline.start(config.timeline, mark_plans=config.timeline_mark_cycles)

    def follow(self, engine: Engine, rank: int, process_set: str = "") -> None:
        """Look at `engine` from now on, in which this rank has the number `rank`."""
        self.timeline.follow(engine, f"{process_set}: " if process_set else "")
        self.metrics.follow(engine)
        if rank == 0:
            self._stalls.follow(engine, process_set)

    def leave(self, engine: Engine) -> None:
        """Look at `engine` no longer. Idempotent."""
        self.timeline.leave(engine)
        self.metrics.leave(engine)
        self._stalls.leave(engine)

    def quiet(self) -> None:
        """Warn of no stalls any more: the engines are about to stop. Idempotent."""
        self._stalls.close()

    def close(self) -> None:
        """Stop looking, and complete the timeline's file. Idempotent."""
        self._stalls.close()
        self.timeline.close()
