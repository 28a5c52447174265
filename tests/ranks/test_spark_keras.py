"""The trainer of `KerasEstimator` on each backend of Keras, on two ranks without Spark."""

from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from helpers.installed import require
from helpers.keras_ranks import BACKENDS, run_checks


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_checks(backend, ["keras_estimator", "keras_estimator_metrics"], tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_with_keras_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("tf_keras")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    run_checks("tensorflow", ["keras_estimator", "keras_estimator_metrics"], tmp_path, monkeypatch)
