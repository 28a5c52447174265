"""Public names of `farandole.spark.rows.converter`."""

from farandole.spark.rows.converter import SparkDatasetConverter, make_spark_converter

__all__ = ["SparkDatasetConverter", "make_spark_converter"]
