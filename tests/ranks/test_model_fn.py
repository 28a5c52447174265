"""Model functions of TensorFlow 1 on two ranks: `HorovodEstimator` without Spark."""

from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from helpers.keras_ranks import run_checks


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_checks("tensorflow", ["model_fn", "lookup_tables"], tmp_path, monkeypatch, patience=120.0)
