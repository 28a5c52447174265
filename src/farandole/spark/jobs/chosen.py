"""Choice of the application that belongs to a session."""

from pyspark.sql import SparkSession

from farandole.spark.jobs.application import Application, is_connect, require_running
from farandole.spark.jobs.classic import ClassicApplication
from farandole.spark.jobs.connect import ConnectApplication


def application_of(spark: SparkSession) -> Application:
    """Return the application of a classic or a Spark Connect session; raises `ConfigError` if it has been stopped."""
    require_running(spark)
    return ConnectApplication(spark) if is_connect(spark) else ClassicApplication(spark)
