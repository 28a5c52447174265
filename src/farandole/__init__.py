"""Synchronous data-parallel training on the engine you already have.

Importing this package loads no framework and no native code; `farandole.torch` and its siblings do."""

from importlib import import_module

TYPE_CHECKING = False  # of `typing`, whose import takes longer than all that is here
if TYPE_CHECKING:
    from farandole import config, errors
    from farandole.config import Config
    from farandole.launch.run import run

__all__ = ["Config", "__version__", "config", "errors", "run"]

__version__ = "0.1.0"

_MODULES = {"Config": "farandole.config", "run": "farandole.launch.run"}  # of names


def __getattr__(name: str) -> object:
    # PEP 562: a command, and Ctrl-C in it, does not wait for imports that it may not need.
    if name in ("config", "errors"):
        return import_module(f"farandole.{name}")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
