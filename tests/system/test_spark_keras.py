"""`KerasEstimator` and `KerasModel` on an embedded Spark, with real ranks, by Horovod's names."""

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

import numpy as np
from pyspark.sql import SparkSession

from farandole.errors import ConfigError, DataError
from farandole.spark.store import Store

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
    assert guesses.schema["guess"].dataType.simpleString() == "float"
    want = resumed.getModel().predict_on_batch(x.astype("float32"))
    np.testing.assert_allclose([row["guess"] for row in guesses.collect()], want[:, 0], rtol=1e-5)
