"""Which columns are refused, from the schema alone: no Spark session is started here."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("pyspark")

from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from farandole.errors import ConfigError, DataError
from farandole.estimators.feed import plan_feed, plan_transformed_feed

SCHEMA = StructType(
    [
        StructField("pixels", ArrayType(FloatType())),
        StructField("vector", VectorUDT()),
        StructField("age", DoubleType()),
        StructField("label", LongType()),
        StructField("held out", BooleanType()),
        StructField("name", StringType()),
        StructField("price", DecimalType(10, 2)),
        StructField("day", DateType()),
        StructField("deep", ArrayType(ArrayType(FloatType()))),
        StructField("vectors", ArrayType(VectorUDT())),
        StructField("words", ArrayType(StringType())),
    ]
)


def test_each_column_is_fed_once() -> None:
    feed = plan_feed(SCHEMA, features=["pixels", "vector", "age"], labels=["label", "pixels"], validation="held out")
    assert feed.columns == ("pixels", "vector", "age", "label")
    assert feed.validation_col == "held out"


def test_rows_of_a_stopped_session_are_refused() -> None:
    rows: Any = SimpleNamespace(sparkSession=SimpleNamespace(sparkContext=SimpleNamespace(_jsc=None)))
    with pytest.raises(ConfigError, match="spark: the session has been stopped; start one"):
        plan_feed(SCHEMA, features=["age"], labels=["label"], validation=None).frame(rows, 2)


@pytest.mark.parametrize("name", ["name", "price", "day", "deep", "vectors", "words"])
def test_a_type_that_no_tensor_holds_is_named(name: str) -> None:
    with pytest.raises(DataError, match=f"column '{name}': no tensor holds (string|decimal|date|array)"):
        plan_feed(SCHEMA, features=[name], labels=["label"], validation=None)


def test_texts_are_fed_where_the_estimator_takes_them() -> None:
    feed = plan_feed(SCHEMA, features=["name", "age"], labels=["name"], validation=None, texts=True)
    assert feed.columns == ("name", "age")
    with pytest.raises(DataError, match=r"array<string>; .* strings and bytes too$"):
        plan_feed(SCHEMA, features=["words"], labels=["label"], validation=None, texts=True)


@pytest.mark.parametrize(
    ("name", "remedy"), [("name", "StringIndexer"), ("price", "cast it to double"), ("day", "datediff")]
)
def test_a_type_that_no_tensor_holds_comes_with_a_remedy(name: str, remedy: str) -> None:
    with pytest.raises(DataError, match=remedy):
        plan_feed(SCHEMA, features=[name], labels=["label"], validation=None)


def test_large_integers_of_a_validation_column_are_not_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpc_status", reason="PySpark's client of Spark Connect is not installed")
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")  # its columns need no session
    rows = Mock()
    rows.sparkSession.sparkContext._jsc.sc.return_value.isStopped.return_value = False
    plan_feed(SCHEMA, features=["age"], labels=["pixels"], validation="label").frame(rows, 2)
    validates = rows.select.call_args.args[-1]
    assert "CAST(not(==(label, 0)) AS TINYINT)" in str(validates).replace("`", "")


def test_a_missing_column_is_named_with_its_neighbor() -> None:
    with pytest.raises(DataError, match=r"column 'Label': is not in the DataFrame.*did you mean 'label'\?"):
        plan_feed(SCHEMA, features=["age"], labels=["Label"], validation=None)


@pytest.mark.parametrize(
    ("validation", "problem"), [("age", "holds booleans or integers"), ("label", "and a feature or label as well")]
)
def test_a_validation_column_must_be_one(validation: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        plan_feed(SCHEMA, features=["age"], labels=["label"], validation=validation)


@pytest.mark.parametrize(
    ("features", "labels", "setting"), [([], ["label"], "feature_cols"), (["age"], [], "label_cols")]
)
def test_nothing_to_learn_from(features: list[str], labels: list[str], setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting}: name at least one column"):
        plan_feed(SCHEMA, features=features, labels=labels, validation=None)


def test_a_function_of_rows_takes_columns_of_any_type() -> None:
    options = {"wanted": ["vector", "x", "label"], "edited": ["x"], "removed": ["name", "day"], "validation": None}
    feed = plan_transformed_feed(SCHEMA, **options)  # type: ignore[arg-type]
    assert feed.columns == ("vector", "label", "name", "day")
    assert feed.as_they_are == {"label", "name", "day"}, "vectors arrive as arrays"
    assert "vector" in plan_transformed_feed(SCHEMA, **options, compressed=True).as_they_are  # type: ignore[arg-type]
    with pytest.raises(DataError, match="column 'x': is not in the DataFrame"):
        plan_transformed_feed(SCHEMA, **(options | {"edited": []}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="name the columns that transformation_fn takes: the DataFrame has none of x"):
        plan_transformed_feed(SCHEMA, **(options | {"wanted": ["x"], "removed": []}))  # type: ignore[arg-type]


def test_compressed_vectors_are_fed_as_they_are() -> None:
    options = {"features": ["pixels", "vector"], "labels": ["label"], "validation": None}
    assert plan_feed(SCHEMA, **options).as_they_are == frozenset()  # type: ignore[arg-type]
    assert plan_feed(SCHEMA, **options, compressed=True).as_they_are == {"vector"}  # type: ignore[arg-type]
