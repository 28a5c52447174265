"""Public names of `farandole.spark.driver.callbacks`."""

from farandole.spark.driver.callbacks import LogCallback

__all__ = ["LogCallback"]
