"""The same fit with Spark and without it: the same rows give the same weights, to the last bit."""

import importlib.util
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pandas")
pytest.importorskip("torch")
pytest.importorskip("lightning")
pytest.importorskip("keras")
pytest.importorskip("tensorflow")
if importlib.util.find_spec("farandole._native") is None:
    pytest.skip("the native core is not built", allow_module_level=True)

import numpy as np
import pyarrow as pa
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from farandole.estimators.store import Store
from farandole.estimators.trainers.row_hash import hash_rows, partition_of
from helpers import programs
from helpers.estimator_rows import settled_torch
from helpers.same_rows import FORMS, make, result_of, rows

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(400)]

TESTS = Path(__file__).parents[1]
settled = pytest.fixture(scope="module", autouse=True)(settled_torch)


def test_a_hash_is_sparks(spark: SparkSession) -> None:
    kinds = "b tinyint, s smallint, i int, l bigint, f float, d double, t boolean, a array<double>, g array<float>, "
    kinds += "n array<array<int>>, p struct<x: int, y: array<bigint>>"
    nan = float("nan")
    cells: list[tuple[Any, ...]] = [
        (-3, 300, -70000, 1 << 40, 1.5, -2.25, True, [1.0, -0.0, nan], [0.1, None], [[1, 2], [], None], (1, [2, None])),
        (3, -1, 7, -1, -0.0, 0.0, False, [], [0.5] * 9, [], (None, [])),
        (0, 0, 0, 0, nan, nan, None, None, None, None, None),
        (None, None, None, None, None, None, True, [2.0], [nan], [[3]], (4, None)),
    ]
    numbers = np.random.default_rng(1).normal(size=(60, 3))
    cells += [(n, n, n, n, *row[:2].tolist(), True, row.tolist(), [], [[n]], (n, [n])) for n, row in enumerate(numbers)]
    frame = spark.createDataFrame(cells, kinds)
    table = frame.select("*", F.xxhash64(*frame.columns).alias("hash")).repartition(5, "hash")
    found = table.select("*", F.spark_partition_id().alias("partition")).toArrow()
    columns = [found[name].combine_chunks() for name in frame.columns]
    columns = [pa.concat_arrays(each.chunks) if isinstance(each, pa.ChunkedArray) else each for each in columns]
    hashes = found["hash"].to_numpy()
    np.testing.assert_array_equal(hash_rows(columns), hashes)
    np.testing.assert_array_equal(partition_of(hashes, 5), found["partition"].to_numpy())
    vectors = spark.createDataFrame([(Vectors.sparse(4, [1], [2.0]),), (Vectors.dense(0.0, 2.0, 0.0, 0.0),)], ["v"])
    both = vectors.select(F.xxhash64(vector_to_array("v")).alias("hash")).toArrow()["hash"].to_pylist()
    assert both == 2 * [int(hash_rows([pa.array([[0.0, 2.0, 0.0, 0.0]])])[0])]


@pytest.fixture(scope="module")
def store(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = Store.create(f"file://{tmp_path_factory.mktemp('same')}/store")
    frame = spark.createDataFrame(rows(), "x array<double>, y double")
    frame.repartition(3).write.parquet(store.get_train_data_path())
    return store


def without_spark(name: str, files: str, out: Path) -> dict[str, Any]:
    """Return the results of all fits that need no Spark, made by a process that could not start Java."""
    command = [sys.executable, "-m", "helpers.same_rows", name, files, str(out)]
    env = {**os.environ, "JAVA_HOME": "/nonexistent", "PYTHONPATH": str(TESTS)}
    done = programs.run(command, framework="any", env=env, timeout=300.0)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = pickle.loads(out.read_bytes())
    return found


@pytest.mark.parametrize("name", sorted(FORMS))
def test_the_same_call_gives_the_same_weights(spark: SparkSession, store: Any, tmp_path: Path, name: str) -> None:
    shuffled = spark.createDataFrame(rows().sample(frac=1.0, random_state=2), "x array<double>, y double")
    found = {"pandas": result_of(make(name).fit(shuffled.repartition(3)))}
    found["arrow"] = found["pandas"]
    if "files" in FORMS[name]:
        found["files"] = result_of(make(name).setStore(store).fit_on_parquet())
    without = without_spark(name, store.get_train_data_path(), tmp_path / "results")
    for form in FORMS[name]:
        weights, history = without[form]
        assert history == found[form][1]
        assert len(weights) == len(found[form][0]) >= 2
        for one, other in zip(weights, found[form][0], strict=True):
            np.testing.assert_array_equal(one, other)
    if "files" in FORMS[name]:  # its batches are others: a share of the files is not a share by content
        assert without["pandas"][1] != without["files"][1]
