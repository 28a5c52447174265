"""Ranks as the tasks of a Spark job: `HorovodRunner`, `run` and their errors.

Importing this package loads nothing else; its names are loaded on first use. A rank imports `farandole.spark.child`
and needs none of Spark, Arrow and NumPy, which the driver's modules import."""

from importlib import import_module
from typing import TYPE_CHECKING

from farandole.extras import importing as _importing

if TYPE_CHECKING:
    from farandole.spark.failure import JobCancelled
    from farandole.spark.logs import log_to_driver
    from farandole.spark.runner import HorovodRunner
    from farandole.spark.session import run

__all__ = ["HorovodRunner", "JobCancelled", "log_to_driver", "run"]

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> object:  # PEP 562
        homes = {"HorovodRunner": "runner", "JobCancelled": "failure", "log_to_driver": "logs", "run": "session"}
        if name in homes:
            with _importing(__name__):
                return getattr(import_module(f"{__name__}.{homes[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
