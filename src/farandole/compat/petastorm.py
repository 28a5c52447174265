"""The function `petastorm.spark.make_spark_converter`, with Petastorm's defaults."""

from typing import Literal

from pyspark.sql import DataFrame

from farandole.spark.jobs.session import active_session
from farandole.spark.rows.converter import ROW_GROUP_BYTES, SparkDatasetConverter
from farandole.spark.rows.converter import make_spark_converter as convert


def make_spark_converter(
    df: DataFrame | str,
    parquet_row_group_size_bytes: int = ROW_GROUP_BYTES,
    compression_codec: str | None = None,
    dtype: Literal["float32", "float64"] | None = "float32",
) -> SparkDatasetConverter:
    """Return a converter of `df`; see `farandole.spark.converter.make_spark_converter`.

    Floating-point columns, and arrays and vectors of floating-point numbers, get the dtype `dtype`. If `df` is a
    string, it is the path or URL of Parquet files, whose rows Spark reads; their dtypes stay unchanged."""
    if isinstance(df, str):
        df, dtype = active_session().read.parquet(df), None
    return convert(df, parquet_row_group_size_bytes, compression_codec, dtype)
