"""Checks of the values of metrics in a `KerasEstimator`'s fit on two ranks."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from farandole.estimators.trainers.keras.model import dump_object
from helpers.estimator_rows import shard_of
from helpers.keras_estimator import job_of, trained
from helpers.keras_library import keras

ROWS = 22
ops: Any = importlib.import_module("keras").ops  # also for metrics of Keras 2


class Largest(keras.metrics.Metric):  # type: ignore[misc]  # Keras ships no types
    """The largest prediction, which is no function of sums."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.largest = self.add_weight(name="largest", shape=(), initializer="zeros")

    def update_state(self, truth: Any, predicted: Any, sample_weight: Any = None) -> None:
        most = ops.max(predicted)
        self.largest.assign(ops.maximum(self.largest, most))

    def result(self) -> Any:
        return self.largest + 0.0


def check_metrics_are_those_of_all_rows(rank: int, size: int, folder: Path) -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(ROWS, 2)).round(3)
    columns: dict[str, Any] = {
        "x": x.tolist(),
        "y": (rng.random(ROWS) < 0.4).astype(float).tolist(),
    }
    held = np.arange(ROWS) % 3 == 0
    # The ranks have unlike shares: rank 0 has most rows.
    share = slice(0, 16) if rank == 0 else slice(16, ROWS)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation="sigmoid")])
    model.set_weights([np.array([[1.0], [-0.5]], "float32"), np.full(1, 0.1, "float32")])
    names = ["RootMeanSquaredError", "AUC", "Precision", "Recall", "BinaryAccuracy", "FalseNegatives", "Largest"]

    def made() -> list[Any]:
        return [(Largest if name == "Largest" else getattr(keras.metrics, name))(name=name) for name in names]

    job = job_of(
        model, columns, epochs=2, batch_size=4, val_batch_size=3, validation_col="held", metrics=dump_object(made()),
        optimizer=dump_object(keras.optimizers.SGD(0.0)), loss="binary_crossentropy",
    )  # fmt: skip
    own = {name: values[share] for name, values in columns.items()}
    run, _ = trained(job, shard_of(folder, own, validates=held[share].astype(int)))
    truth, predicted = np.array(columns["y"])[:, None], model.predict(x.astype("float32"), verbose=0)
    ranks = np.arange(ROWS) >= 16
    for record in run.checkpoint.history:
        for prefix, rows in (("", ~held), ("val_", held)):
            for metric in made()[:-1]:
                metric.update_state(truth[rows], predicted[rows])
                np.testing.assert_allclose(record[prefix + metric.name], float(metric.result()), rtol=1e-5)
            of_ranks = [predicted[rows & (ranks == each)].max() for each in (False, True)]
            counts = [np.sum(rows & (ranks == each)) for each in (False, True)]
            np.testing.assert_allclose(record[f"{prefix}Largest"], np.average(of_ranks, weights=counts), rtol=1e-5)
