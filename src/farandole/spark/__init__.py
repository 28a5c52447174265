"""Ranks as the tasks of a Spark job: `HorovodRunner`, `run` and their errors.

Importing this package loads nothing else; its names are loaded on first use. A rank imports
`farandole.spark.jobs.child` and needs none of Spark, Arrow and NumPy, which the driver's modules import. Estimators are
in `farandole.estimators`; `farandole.spark.torch` and its like are their public names, as saved models hold them."""

from importlib import import_module
from typing import TYPE_CHECKING

from farandole.extras import importing as _importing

if TYPE_CHECKING:
    from farandole.spark.driver.messages import log_to_driver
    from farandole.spark.jobs.elastic import run_elastic
    from farandole.spark.jobs.failure import JobCancelled
    from farandole.spark.jobs.runner import HorovodRunner
    from farandole.spark.jobs.session import run

__all__ = ["HorovodRunner", "JobCancelled", "log_to_driver", "run", "run_elastic"]

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> object:  # PEP 562
        homes = {
            "HorovodRunner": "jobs.runner",
            "JobCancelled": "jobs.failure",
            "log_to_driver": "driver.messages",
            "run": "jobs.session",
            "run_elastic": "jobs.elastic",
        }
        if name in homes:
            with _importing(__name__):
                return getattr(import_module(f"{__name__}.{homes[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
