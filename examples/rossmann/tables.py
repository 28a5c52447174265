"""The competition's files as Spark DataFrames."""

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from rossmann.files import SCHEMAS, WEATHER


@dataclass(frozen=True)
class Tables:
    """The files as DataFrames, with the files' columns unless noted."""

    train: DataFrame
    test: DataFrame
    stores: DataFrame  # with State
    weather: DataFrame  # with State
    trend: DataFrame  # State, null for Germany as a whole; Week, its first day; trend


def read(spark: SparkSession, folder: str) -> Tables:
    """Declare DataFrames of the files in `folder`, a path or URL that Spark reads; runs no job."""

    def table(name: str) -> DataFrame:
        return spark.read.csv(f"{folder}/{name}", SCHEMAS[name], header=True)

    weather = spark.read.csv(f"{folder}/weather/*.csv", WEATHER, sep=";", header=True, nullValue="NA")
    weather = weather.withColumn("StateName", F.regexp_extract(F.input_file_name(), r"([^/]+)\.csv$", 1))
    return Tables(
        train=table("train.csv"),
        test=table("test.csv"),
        stores=table("store.csv").join(F.broadcast(table("store_states.csv")), "Store", "left"),
        weather=weather.join(F.broadcast(table("state_names.csv")), "StateName").drop("StateName"),
        trend=table("googletrend.csv").select(
            _state_of_trend(F.col("file")).alias("State"),
            F.to_date(F.substring("week", 1, 10)).alias("Week"),
            F.col("trend").cast("double").alias("trend"),
        ),
    )


def _state_of_trend(file: Column) -> Column:
    """Return the state's code in a name such as Rossmann_DE_SN; null for Rossmann_DE.

    Lower Saxony has the code "HB,NI" in the other files, as it stands for Bremen too."""
    code = F.regexp_extract(file, "^Rossmann_DE_(.+)$", 1)
    return F.when(code == "NI", "HB,NI").when(code != "", code)
