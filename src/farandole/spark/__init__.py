"""Ranks as the tasks of a Spark job: `HorovodRunner` and `run`."""

from farandole.spark.logs import log_to_driver
from farandole.spark.run import run
from farandole.spark.runner import HorovodRunner

__all__ = ["HorovodRunner", "log_to_driver", "run"]
