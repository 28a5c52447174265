"""Refusals of a `KerasEstimator` before any rank starts."""

from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("keras")

import keras

from farandole.errors import ConfigError
from farandole.estimators.keras import KerasEstimator


@pytest.fixture(params=["keras", "tf_keras"])
def library(request: pytest.FixtureRequest) -> Any:
    if request.param == "tf_keras" and keras.config.backend() != "tensorflow":
        pytest.skip("tf_keras needs KERAS_BACKEND=tensorflow")
    return pytest.importorskip(request.param)


def estimator(library: Any, **more: Any) -> KerasEstimator:
    model = library.Sequential([library.layers.Input((2,)), library.layers.Dense(1)])
    return KerasEstimator(
        model=model, feature_cols=["x"], label_cols=["y"], **{"optimizer": "sgd", "loss": "mse"} | more
    )


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"loss": "mze"}, "loss: holds 'mze', which is not in LIBRARY.losses"),
        ({"loss": 7}, "loss: holds 7"),
        ({"metrics": ["mae", "accurate"]}, "metrics: holds 'accurate', which is not in LIBRARY.metrics"),
        ({"metrics": [["mae", "auk"]]}, "metrics: holds 'auk'"),
    ],
)
def test_unknown_losses_and_metrics_are_refused(library: Any, wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}".replace("LIBRARY", library.__name__)):
        estimator(library, **wrong)._check()


def test_losses_and_metrics_may_be_names_objects_functions_and_custom_objects(library: Any) -> None:
    def own(truth: Any, predicted: Any) -> Any:
        return (truth - predicted) ** 2

    metrics = ["acc", "accuracy", "mae", "AUC", library.metrics.Precision(), library.metrics.AUC, own, "own"]
    made = estimator(library, loss="own", metrics=metrics, custom_objects={"own": own})
    made._check()
    assert made._known("loss", made.getLoss()) == [own]
    assert made._known("metrics", made.getMetrics()) == [*metrics[:-1], own]
    for loss in (library.losses.Huber(), library.losses.Huber, own, "MSE"):
        estimator(library, loss=loss)._check()
