"""Knobs: the settings that can change while a job runs."""

from dataclasses import asdict, dataclass
from typing import Self

from farandole import _native
from farandole.config import Config

LARGEST_SLOT = 512 << 10  # bytes per slot of the segment if autotune may change the size


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    """The knobs of all ranks from one turn to the next; `Config` documents each one."""

    fusion_threshold: int
    slot_bytes: int
    link_chunk: int
    link_small: int
    hierarchical: bool

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the knobs that `config` sets."""
        return cls(
            fusion_threshold=config.fusion_threshold,
            slot_bytes=config.slot_bytes,
            link_chunk=config.link_chunk,
            link_small=config.link_small,
            hierarchical=config.hierarchical,
        )

    @classmethod
    def of_engine(cls, knobs: _native.Knobs) -> Self:
        """Return the knobs of an engine."""
        return cls(
            fusion_threshold=knobs.fusion_threshold,
            slot_bytes=knobs.slot_bytes,
            link_chunk=knobs.link_chunk,
            link_small=knobs.link_small,
            hierarchical=knobs.hierarchical,
        )

    def for_engine(self) -> _native.Knobs:
        """Return the knobs in the form that an engine takes."""
        return _native.Knobs(**asdict(self))
