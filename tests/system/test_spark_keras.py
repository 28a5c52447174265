"""`KerasEstimator` and `KerasModel` on an embedded Spark, with real ranks, by Horovod's names."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

import numpy as np
from pyspark.sql import SparkSession

from farandole.errors import ConfigError, DataError
from farandole.estimators.store import Store

pytestmark = [
    pytest.mark.usefixtures("horovod_with_keras"),
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.native,
    pytest.mark.timeout(400),
]


def test_fit_transform_save_load_and_resume(spark: SparkSession, tmp_path: Path) -> None:
    import horovod.keras as hvd
    import keras
    from horovod.spark.keras import KerasEstimator, KerasModel

    class Doubled(keras.layers.Layer):  # type: ignore[misc]  # of this function: ranks can import it from nowhere
        def call(self, inputs: object) -> object:
            return 2.0 * inputs  # type: ignore[operator]

    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((2,)), Doubled(), keras.layers.Dense(1)])
    rows = [([float(i % 7), float(i % 3)], i / 24, i) for i in range(24)]
    data = spark.createDataFrame(rows, "x array<double>, y double, id bigint")
    store = Store.create(str(tmp_path / "store"))
    estimator = KerasEstimator(
        num_proc=2, model=model, store=store, run_id="kept", optimizer=keras.optimizers.SGD(2.0**-9), loss="mse",
        metrics=["mae"], feature_cols=["x"], label_cols=["y"], batch_size=100, epochs=1, random_seed=1, verbose=0,
    )  # fmt: skip
    with pytest.raises(DataError, match="'nowhere': is not in the DataFrame"):
        estimator.fit(data, {estimator.feature_cols: ["nowhere"]})
    with pytest.raises(ConfigError, match="are 2 columns, the model has 1 inputs"):
        estimator.fit(data, {estimator.feature_cols: ["x", "id"]})

    # One step over all rows; the ranks multiply the rate by their number.
    fitted = estimator.fit(data)
    kernel, bias = model.get_weights()
    x, y = np.array([row[0] for row in rows]), np.array([[row[1]] for row in rows])
    error = 2 * x @ kernel + bias - y
    step = 2 * 2.0**-9 * 2 / len(y)
    got = fitted.getModel().get_weights()
    np.testing.assert_allclose(got[0], kernel - step * 2 * x.T @ error, rtol=1e-4)
    np.testing.assert_allclose(got[1], bias - step * error.sum(0), rtol=1e-4)
    assert fitted.getHistory()["loss"] == pytest.approx([float((error**2).mean())], rel=1e-4)
    assert fitted.getHistory()["mae"] == pytest.approx([float(abs(error).mean())], rel=1e-4)

    estimator.setEpochs(2).write().overwrite().save(str(tmp_path / "estimator"))
    resumed = KerasEstimator.load(str(tmp_path / "estimator")).fit(data)
    assert [record["epoch"] for record in resumed.history] == [1, 2]
    assert resumed.history[0] == fitted.history[0]
    assert resumed.history[1]["loss"] < resumed.history[0]["loss"]

    class KilledOnce(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            if epoch == 1 and hvd.rank() == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    mark, anew = tmp_path / "killed", {estimator.run_id: "killed", estimator.callbacks: [KilledOnce()]}
    recovered = estimator.fit(data, anew)
    assert mark.exists()
    for one, other in zip(recovered.getModel().get_weights(), resumed.getModel().get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert [record["loss"] for record in recovered.history] == [record["loss"] for record in resumed.history]

    resumed.write().overwrite().save(str(tmp_path / "fitted"))
    loaded = KerasModel.load(str(tmp_path / "fitted")).setOutputCols(["guess"])
    assert (loaded.getRunId(), loaded.history) == ("kept", resumed.history)
    guesses = loaded.transform(data).orderBy("id")
    assert guesses.schema["guess"].dataType.simpleString() == "double"
    want = resumed.getModel().predict_on_batch(x.astype("float32"))
    np.testing.assert_allclose([row["guess"] for row in guesses.collect()], want[:, 0], rtol=1e-5)


def test_a_pipeline_with_a_function_of_rows_two_outputs_and_weights(spark: SparkSession) -> None:
    import keras
    from horovod.spark.keras import KerasEstimator
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import VectorAssembler
    from pyspark.ml.tuning import ParamGridBuilder

    def doubled(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "x": [2.0 * len(row["word"]), row["x"][1]]}

    rows = [
        ("a" * (n % 3), float(n % 3), 1.0, n / 4, [float(n % k) for k in (1, 2, 3, 4)], n % 3 + 0.5, n >= 8)
        for n in range(14)
    ]
    data = spark.createDataFrame(rows, ["word", "a", "b", "y", "square", "w", "held"])
    given = keras.Input((2,))
    heads = [keras.layers.Dense(size, use_bias=False, kernel_initializer="ones") for size in (1, 4)]
    model = keras.Model(given, [heads[0](given), keras.layers.Reshape((2, 2))(heads[1](given))])
    rate = 2.0**-7
    estimator = KerasEstimator(
        num_proc=2, model=model, optimizer=keras.optimizers.SGD(rate / 2), loss=["mse", "mse"],
        loss_weights=[0.25, 0.75], feature_cols=["x"], label_cols=["y", "square"], label_shapes=[[-1, 1], [-1, 2, 2]],
        sample_weight_col="w", validation="held", batch_size=50, val_batch_size=2, epochs=2, verbose=0,
        validation_steps_per_epoch=1, transformation_fn=doubled, inmemory_cache_all=True, compress_sparse_cols=True,
        transformation_edit_fields=[("x", np.float32, (2,), False)], transformation_removed_fields=["word"],
    )  # fmt: skip
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="x"), estimator])
    (fitted,) = pipeline.fit(data, ParamGridBuilder().addGrid(estimator.train_steps_per_epoch, [3]).build())
    best = fitted.stages[-1]
    x = np.array([[2.0 * row[1], 1.0] for row in rows[:8]])
    y, square, w = (np.array([row[place] for row in rows[:8]]) for place in (3, 4, 5))
    weights = [np.ones((2, 1)), np.ones((2, 4))]
    for _ in range(2 * 3):  # each step has all rows
        for share, weight, label in zip((0.25, 0.75), weights, (y[:, None], square), strict=True):
            error = (x @ weight - label) * w[:, None]
            weight -= rate * share * 2 * x.T @ error / label.size
    got = {each.shape: each for each in best.getModel().get_weights()}
    for weight in weights:
        np.testing.assert_allclose(got[weight.shape], weight, rtol=1e-4)
    assert [record["steps"] for record in best.history] == [3, 3]
    assert all(record["val_loss"] > 0 for record in best.history)
    assert len(fitted.transform(data).first()["square__output"]) == 4
