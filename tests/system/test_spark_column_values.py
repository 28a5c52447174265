"""Values and names of columns that estimators and models meet: nulls, NaN, small integers, one name for two columns."""

import importlib.util
import math
from typing import Literal

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")
if importlib.util.find_spec("farandole._native") is None:
    pytest.skip("the native core is not built", allow_module_level=True)

import numpy as np
import torch
from pyspark.errors import PySparkException
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ByteType, DoubleType, ShortType, StructField, StructType
from torch import Tensor, nn

from farandole.errors import DataError
from farandole.estimators.torch import TorchEstimator, TorchModel
from farandole.spark import HorovodRunner
from farandole.spark.converter import make_spark_converter

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.usefixtures("warm_torch")]


class Doubling(nn.Module):
    """Returns its inputs, times a weight that begins as 2, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, *columns: Tensor) -> Tensor:
        rows = torch.cat([each.reshape(len(each), -1) for each in columns], dim=1)
        return rows * self.weight


def estimator(**changes: object) -> TorchEstimator:
    model = Doubling()
    settings: dict[str, object] = {
        "num_proc": 2, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=2.0**-20),
        "loss": nn.functional.mse_loss, "feature_cols": ["x"], "label_cols": ["y"], "verbose": 0,
    }  # fmt: skip
    return TorchEstimator(**(settings | changes))  # type: ignore[arg-type]


def doubling(*features: str, model: nn.Module | None = None) -> TorchModel:
    return TorchModel(model=model or Doubling(), feature_columns=features, label_columns=["y"])


def vectors(spark: SparkSession) -> DataFrame:
    schema = StructType([StructField("x", VectorUDT()), StructField("y", DoubleType())])
    rows = [(Vectors.dense([1.0, 2.0]), 1.0), (None, 2.0), (Vectors.sparse(2, [0], [1.0]), 3.0)]
    return spark.createDataFrame(rows, schema)


@pytest.mark.parametrize("compressed", [False, True])
def test_null_vectors_are_counted(spark: SparkSession, compressed: bool) -> None:
    with pytest.raises(DataError, match="column 'x': 1 of 3 rows are null"):
        estimator(compress_sparse_cols=compressed).fit(vectors(spark))


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_converter_refuses_null_vectors(spark: SparkSession, dtype: Literal["float32"] | None) -> None:
    converter = make_spark_converter(vectors(spark), dtype=dtype)
    # Rows are read beside the block. Who notices the null, and in how many rows, depends on how many are written then.
    with pytest.raises(DataError, match="fill or drop"), converter.make_torch_dataloader() as loader:
        next(iter(loader))


def test_a_prediction_of_a_null_is_refused(spark: SparkSession) -> None:
    holding = {
        "double": [(1.0,), (None,)],
        "int": [(1,), (None,)],
        "array<double>": [([1.0, 2.0],), ([3.0, None],)],
        "array<int>": [([1, 2],), ([3, None],)],
        "array<boolean>": [([True, False],), (None,)],
    }
    frames = {kind: spark.createDataFrame(rows, f"x {kind}") for kind, rows in holding.items()}
    for rows in (*frames.values(), vectors(spark)):
        with pytest.raises(PySparkException, match="column 'x': a row is null or holds a null"):
            doubling("x").transform(rows).collect()


def test_nan_goes_through_the_model(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(1.5, [2.0, 3.0]), (math.nan, [4.0, math.nan])], "a double, b array<double>")
    for model in (Doubling(), Doubling().double()):
        one, more = doubling("a", model=model), doubling("a", "b", model=model)
        outputs = more.setOutputCols(["all"]).transform(one.setOutputCols(["one"]).transform(rows)).collect()
        assert [each["one"] for each in outputs] == pytest.approx([3.0, math.nan], nan_ok=True)
        wanted = [[3.0, 4.0, 6.0], [math.nan, 8.0, math.nan]]
        np.testing.assert_array_equal(np.array([each["all"] for each in outputs], float), wanted)


def test_bytes_and_shorts_are_numbers(spark: SparkSession) -> None:
    schema = StructType([StructField("b", ByteType()), StructField("s", ShortType()), StructField("v", ByteType())])
    rows = spark.createDataFrame([(n - 128, n * 100, n % 2) for n in range(9)], schema)
    fitted = estimator(feature_cols=["b"], label_cols=["s"], sample_weight_col="v", batch_size=9).fit(rows)
    # Two ranks take one step: the mean over all rows of the loss times the weight.
    wanted = np.mean([(n % 2) * (2 * (n - 128) - n * 100) ** 2 for n in range(9)])
    assert fitted.history[0]["loss"] == pytest.approx(wanted, rel=1e-5)
    predicted = doubling("b", "s").transform(rows).collect()
    assert [each["y__output"] for each in predicted] == [[2.0 * each["b"], 2.0 * each["s"]] for each in predicted]


@pytest.mark.parametrize("name", ["x", "X"])
def test_two_columns_of_one_name_are_refused(spark: SparkSession, name: str) -> None:
    rows = spark.createDataFrame([(1.0, 1.0, 2.0)], "x double, y double, z double").toDF("x", "y", name)
    problem = f"column 'x': is the name of several columns for Spark \\(x and {name}\\)"
    with pytest.raises(DataError, match=problem):
        estimator().fit(rows)
    with pytest.raises(DataError, match=problem):
        doubling("x").transform(rows)
    with pytest.raises(DataError, match=problem):
        make_spark_converter(rows, dtype="float32")
    with pytest.raises(DataError, match=problem):
        HorovodRunner(np=2).run(print, rows=rows)
    with pytest.raises(DataError, match="column 'x': is among the columns already"):
        doubling("y").setOutputCols(["x"]).transform(rows.toDF("other", "y", name))


def test_names_that_differ_in_case_where_spark_heeds_it(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(1.0, 3.0)], "x double, z double").toDF("x", "X")
    spark.conf.set("spark.sql.caseSensitive", True)
    try:
        assert doubling("X").transform(rows).first()["y__output"] == 6.0  # type: ignore[index]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
