"""`HorovodEstimator` and `TFTransformer` on an embedded Spark, with real ranks, by the names of `sparkdl`."""

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

import numpy as np
from pyspark.ml import Pipeline, PipelineModel
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import SparkSession
from pyspark.sql.functions import lit

from farandole.errors import ConfigError, DataError

pytestmark = [
    pytest.mark.usefixtures("horovod_with_keras"),
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.native,
    pytest.mark.timeout(400),
]


def test_tasks_may_run_several_ranks(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from farandole.estimators import tensorflow

    class Asked(Exception):
        pass

    def ask(*_: object, **settings: object) -> None:
        raise Asked(settings["num_proc"], settings["tasks"])

    monkeypatch.setattr(tensorflow, "run_training_job", ask)
    profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1)).build
    estimator = tensorflow.HorovodEstimator(
        modelFn=print, featureMapping={"x": "x"}, modelDir=str(tmp_path), labelCol="y", maxSteps=1, ranksPerTask=2
    )
    data = spark.createDataFrame([(1.0, 2.0)], "x double, y double")
    for changes in ({}, {estimator.numProc: 4, estimator.resourceProfile: profile}):
        with pytest.raises(Asked) as caught:
            estimator.fit(data, changes)
        ranks, tasks = caught.value.args
        assert (ranks, tasks.ranks_per_task, tasks.profile) == (4, 2, profile if changes else None)
    with pytest.raises(ConfigError, match=r"^resourceProfile: must be what ResourceProfileBuilder"):
        estimator.setResourceProfile({"cpus": 2})
    with pytest.raises(ConfigError, match=r"^resourceProfile: is for clusters, where Spark places tasks"):
        estimator.fit(data, {estimator.resourceProfile: profile})


def test_fit_with_a_killed_rank_transform_save_and_load(spark: SparkSession, tmp_path: Path) -> None:
    from sparkdl.estimators.horovod_estimator.estimator import HorovodEstimator
    from sparkdl.transformers.tf_tensor import TFTransformer

    def model_fn(features, labels, mode, params):  # type: ignore[no-untyped-def]  # as in a notebook
        import os
        import signal

        import horovod.tensorflow as hvd
        import tensorflow.compat.v1 as tf

        from farandole.tensorflow import estimator

        kernel = tf.get_variable("kernel", [2, 1], initializer=tf.zeros_initializer())
        line = tf.matmul(tf.reshape(features["point"], [-1, 2]), kernel)[:, 0]
        predictions = {
            "predictions": line,
            "both": tf.stack([line, -line], 1),
            "sign": tf.where(line > 0.0, tf.fill(tf.shape(line), "plus"), tf.fill(tf.shape(line), "minus")),
        }
        if mode == estimator.ModeKeys.PREDICT:
            return estimator.EstimatorSpec(mode, predictions=predictions)
        loss = tf.losses.mean_squared_error(labels, line)
        optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(params["rate"] * hvd.size()))
        train_op = optimizer.minimize(loss, global_step=tf.train.get_global_step())
        hooks = []
        if hvd.rank() == 1 and not os.path.exists(params["killed"]):

            class Kill(tf.train.SessionRunHook):  # type: ignore[misc,name-defined]  # TensorFlow ships no types
                def after_run(self, context, values):  # type: ignore[no-untyped-def]
                    if os.path.exists(params["saved"]):  # after the step that follows the first checkpoint
                        open(params["killed"], "w").close()
                        os.kill(os.getpid(), signal.SIGKILL)

            hooks.append(Kill())
        metrics = {"mae": tf.metrics.mean_absolute_error(labels, line)}
        return estimator.EstimatorSpec(
            mode, loss=loss, train_op=train_op, training_hooks=hooks, eval_metric_ops=metrics
        )

    # Rows alike, as Spark chooses which of them go to which rank.
    rows = [([1.0, 2.0], 3.0 if n % 4 == 0 else 0.5, n % 4 == 0) for n in range(24)]
    data = spark.createDataFrame(rows, "x array<float>, y float, held boolean")
    others = [([float(n % 7), -float(n % 3)], n) for n in range(24)]
    new = spark.createDataFrame(others, "x array<float>, id bigint")
    killed = tmp_path / "killed"
    given = HorovodEstimator(
        modelFn=model_fn, featureMapping={"x": "point"}, modelDir=str(tmp_path / "model"), labelCol="y", batchSize=4,
        maxSteps=2, isValidationCol="held", saveCheckpointsSecs=1e-9, verbose=0,
        modelFnParams={"rate": 2.0**-9, "killed": str(killed), "saved": str(tmp_path / "model" / "checkpoint")},
    )  # fmt: skip
    given.write().save(str(tmp_path / "estimator"))
    estimator = HorovodEstimator.load(str(tmp_path / "estimator"))
    with pytest.raises(DataError, match="'nowhere': is not in the DataFrame"):
        estimator.fit(data, {estimator.labelCol: "nowhere"})
    with pytest.raises(ConfigError, match="must map columns to distinct keys"):
        estimator.fit(data, {estimator.featureMapping: {"x": "a", "y": "a"}})

    fitted = Pipeline(stages=[estimator]).fit(data)
    assert killed.exists(), "Spark has started all ranks again, after a checkpoint"
    kernel = np.zeros(2)
    for _ in range(2):
        kernel -= 2 * 2.0**-9 * 2 * np.array([1.0, 2.0]) * (kernel @ [1.0, 2.0] - 0.5)  # the rate times two ranks
    x = np.array([row[0] for row in others])
    fitted.write().save(str(tmp_path / "fitted"))
    loaded = PipelineModel.load(str(tmp_path / "fitted"))
    jobs = spark.sparkContext.statusTracker()
    before = len(jobs.getJobIdsForGroup(None))
    predicted = loaded.transform(new)
    assert predicted.dtypes[2:] == [("predictions", "float"), ("both", "array<float>"), ("sign", "string")]
    assert len(jobs.getJobIdsForGroup(None)) == before, "columns and types are known without a job"
    got = predicted.orderBy("id").collect()
    np.testing.assert_allclose([row["predictions"] for row in got], x @ kernel, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose([row["both"][1] for row in got], -(x @ kernel), rtol=1e-4, atol=1e-7)
    assert [row["sign"] for row in got] == ["plus" if value > 0 else "minus" for value in x @ kernel]

    (transformer,) = loaded.stages
    assert isinstance(transformer, TFTransformer)
    renamed = transformer.copy().setOutputMapping({"predictions": "guess"})
    assert renamed.transform(new).columns == ["x", "id", "guess"]
    for mapping, text in (({"strange": "guess"}, "the graph has no 'strange'"), ({"predictions": "id"}, "already")):
        with pytest.raises((ConfigError, DataError), match=text):
            transformer.copy().setOutputMapping(mapping).transform(new)


CITIES = ["Bern", "Zürich", "Genève", ""]


@pytest.mark.parametrize("kind", ["graph", "keras"])
def test_texts_as_features_and_labels(kind: str, spark: SparkSession, tmp_path: Path) -> None:
    from farandole.estimators.tensorflow import HorovodEstimator

    cities = CITIES

    def graph(features, labels, mode, params):  # type: ignore[no-untyped-def]
        import tensorflow.compat.v1 as tf

        import farandole.tensorflow as hvd
        from farandole.tensorflow import estimator

        is_city = tf.equal(tf.reshape(features["city"], [-1, 1]), tf.constant([cities]))
        first = tf.cast(tf.io.decode_raw(features["raw"], tf.uint8), tf.float32)
        kernel = tf.get_variable("kernel", [7, 2], initializer=tf.zeros_initializer())
        logits = tf.matmul(tf.concat([tf.cast(is_city, tf.float32), first / 255], 1), kernel)
        predictions = {"guess": tf.gather(tf.constant(["no", "yes"]), tf.argmax(logits, 1))}
        if mode == estimator.ModeKeys.PREDICT:
            return estimator.EstimatorSpec(mode, predictions=predictions)
        loss = tf.losses.sparse_softmax_cross_entropy(tf.cast(tf.equal(labels, "yes"), tf.int64), logits)
        optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(1.0))
        train_op = optimizer.minimize(loss, global_step=tf.train.get_global_step())
        return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    def keras_model(params):  # type: ignore[no-untyped-def]
        import keras

        city, raw = (keras.Input((1,), dtype="string", name=name) for name in ("city", "raw"))
        parts = [
            keras.layers.StringLookup(vocabulary=cities, output_mode="one_hot")(city),
            keras.layers.Flatten()(keras.layers.Hashing(8, output_mode="one_hot")(raw)),
        ]
        answer = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Concatenate()(parts))
        model = keras.Model([city, raw], answer)
        model.compile(keras.optimizers.SGD(1.0), "binary_crossentropy")
        return model

    rows = [
        (CITIES[n % 4], bytearray([n % 4, 0, 255]), ["no", "yes"][n % 4 > 1], n % 4 > 1, n % 8 > 3) for n in range(64)
    ]
    data = spark.createDataFrame(rows, "city string, raw binary, answer string, number boolean, held boolean")
    given = HorovodEstimator(
        modelFn=graph if kind == "graph" else keras_model, featureMapping={"city": "city", "raw": "raw"},
        labelCol="answer" if kind == "graph" else "number", isValidationCol="held", modelDir=str(tmp_path),
        batchSize=8, maxSteps=20, verbose=0,
    )  # fmt: skip
    with pytest.raises(DataError, match=r"column 'city': 1 of 65 rows are null"):
        given.fit(data.union(data.limit(1).withColumn("city", lit(None))), {given.modelDir: str(tmp_path / "nulls")})
    fitted = given.fit(data)
    for each in fitted.transform(data).collect():
        guess = each["guess"] if kind == "graph" else ["no", "yes"][each["predictions"] > 0.5]
        assert guess == each["answer"]
    with pytest.raises(DataError, match=r"column 'number': holds numbers, and city of the graph takes string"):
        fitted.copy().setInputMapping({"number": "city", "raw": "raw"}).transform(data)


def test_the_notebook_of_horovod_estimator(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    example = Path(__file__).parents[2] / "examples" / "spark_horovod_estimator.py"
    monkeypatch.setattr(sys, "argv", [str(example), "--steps", "120", "--model-dir", str(tmp_path)])
    runpy.run_path(str(example), run_name="__main__")
    said = capfd.readouterr().out
    assert re.search(r"step 120: loss [0-9.]+; validation: loss [0-9.]+, accuracy 0.[89]", said), said
    assert float(re.findall(r"other digits: ([0-9.]+)", said)[0]) > 0.8
    assert (tmp_path / "export" / "120" / "saved_model.pb").exists()
