"""Choice of the application that belongs to a session."""

from pyspark.sql import SparkSession

from farandole.spark.jobs.application import Application, is_connect

__all__ = ["application_of"]


def application_of(spark: SparkSession) -> Application:
    """Return the application of a classic or a Spark Connect session."""
    if is_connect(spark):
        from farandole.spark.jobs.connect import ConnectApplication

        return ConnectApplication(spark)
    from farandole.spark.jobs.classic import ClassicApplication

    return ClassicApplication(spark)
