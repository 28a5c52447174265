"""Public names of `farandole.spark.driver.messages`."""

from farandole.spark.driver.messages import LONGEST_MESSAGE, log_to_driver, send

__all__ = ["LONGEST_MESSAGE", "log_to_driver", "send"]
