"""Synchronous data-parallel training on the engine you already have.

Importing this package loads no framework and no native code; `farandole.torch` and its siblings do."""

from typing import TYPE_CHECKING

from farandole import errors
from farandole.config import Config

if TYPE_CHECKING:
    from farandole.launch.run import run

__all__ = ["Config", "__version__", "errors", "run"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "run":
        # PEP 562: `run` imports the launcher, which most users of this package never need.
        from farandole.launch.run import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
