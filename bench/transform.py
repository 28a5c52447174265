"""Speed of a fitted PyTorch model that predicts the rows of a DataFrame.

    python bench/transform.py [--rows 200000] [--columns 37] [--rounds 3] [--cores 2] [--sample 20]

`TorchModel.transform` is compared with Spark's own `predict_batch_udf`, and with a model that is called for each row,
as Horovod's transform does. They take turns in one Spark session (local[cores]) on a column of float32 arrays that
Spark has in memory; each job sums all predictions. Calling the model for each row is slow, so that contender reads one
row in `sample` of each partition. Its time for all rows is extrapolated: the time for a single row of each partition,
which every job has, plus `sample` times the rest. Writes bench/results/*-transform.json."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from comparison import OURS, compare, table
from feed import session
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import FloatType, StructField, StructType
from race import Race, race, record

from farandole.estimators.torch import TorchModel

BATCHED, BY_ROW = "predict_batch_udf", "row at a time"
PARTITIONS = 8
MUSTS = {BATCHED: 1.0, BY_ROW: 10.0}
BATCH = 1024  # rows per call of the model, for the contenders with batches


def make_model(columns: int) -> torch.nn.Module:
    """Return a small network for rows of a table."""
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(columns, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


def make_frame(spark: SparkSession, rows: int, columns: int) -> DataFrame:
    """Return a DataFrame with a row number and an array of floats in each row."""
    numbers = [F.rand(place).cast("float") for place in range(columns)]
    frame = spark.range(0, rows, 1, PARTITIONS).select("id", F.array(*numbers).alias("x")).persist()
    assert frame.count() == rows
    return frame


def batched(model: torch.nn.Module, columns: int) -> Callable[[DataFrame], DataFrame]:
    """Return a transform that predicts with Spark's `predict_batch_udf`."""

    def make() -> Callable[[np.ndarray], np.ndarray]:
        def predict(inputs: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                made: np.ndarray = model(torch.from_numpy(inputs)).numpy()
            return made

        return predict

    function = predict_batch_udf(make, return_type=FloatType(), batch_size=BATCH, input_tensor_shapes=[[columns]])
    return lambda frame: frame.withColumn("y__output", function("x"))


def by_row(model: torch.nn.Module) -> Callable[[DataFrame], DataFrame]:
    """Return a transform that predicts in a loop over rows."""

    def predict(rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            with torch.no_grad():
                made = model(torch.tensor([row["x"]]))
            yield Row(**row.asDict(), y__output=float(made))

    def transform(frame: DataFrame) -> DataFrame:
        schema = StructType([*frame.schema.fields, StructField("y__output", FloatType())])
        return frame.sparkSession.createDataFrame(frame.rdd.mapPartitions(predict), schema)

    return transform


@dataclass(frozen=True)
class Task:
    """Rows in Spark's memory, and the sum of their predictions."""

    frame: DataFrame
    total: float

    @classmethod
    def of(cls, frame: DataFrame, model: torch.nn.Module) -> "Task":
        kept = frame.persist()
        values = np.stack(kept.select("x").toPandas()["x"].to_list())
        with torch.inference_mode():
            return cls(kept, float(model(torch.from_numpy(values)).double().sum()))

    def timed(self, transform: Callable[[DataFrame], DataFrame]) -> float:
        """Return the seconds until the sum of the predictions is known."""
        began = time.monotonic()
        total = transform(self.frame).agg(F.sum("y__output")).collect()[0][0]
        taken = time.monotonic() - began
        assert abs(total - self.total) < 1e-3 * abs(self.total) + 1e-3, (total, self.total)
        return taken


def measure(spark: SparkSession, given: argparse.Namespace) -> Race:
    model, frame = make_model(given.columns), make_frame(spark, given.rows, given.columns)
    ours = TorchModel(model=model, feature_columns=["x"], label_columns=["y"], outputs=[("float32", [1])])
    theirs, slow = batched(model, given.columns), by_row(model)
    width = given.rows // PARTITIONS  # rows of a partition
    few, some, everything = (
        Task.of(frame.where(F.col("id") % width < rows), model) for rows in (1, width // given.sample, width)
    )

    def scaled() -> float:
        fixed = few.timed(slow)
        return fixed + given.sample * max(some.timed(slow) - fixed, 0.0)

    contenders: dict[str, Any] = {
        OURS: lambda: everything.timed(ours.transform),
        BATCHED: lambda: everything.timed(theirs),
        BY_ROW: scaled,
    }
    return race(contenders, given.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--columns", type=int, default=37)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--sample", type=int, default=20, help="of how many rows one is taken at a time")
    given = parser.parse_args()
    with session(given.cores) as spark:
        found = measure(spark, given)
    what = f"{given.rows} rows x {given.columns}, {given.cores} cores"
    lines = compare(f"transform of {what}", found, MUSTS)
    sys.stdout.write(f"{table(what, lines)}\n")
    races = {f"{what}: seconds to the sum of the predictions": found}
    sys.stdout.write(f"{record('transform', races, ('farandole', 'pyarrow', 'pyspark', 'torch'), lines)}\n")


if __name__ == "__main__":
    main()
