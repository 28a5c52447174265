"""Models and estimators that were saved when their classes were in `farandole.spark` load today."""

import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")

import pandas as pd

from farandole.estimators.store import LocalStore
from farandole.estimators.torch import TorchEstimator, TorchModel

SAVED = Path(__file__).parents[2] / "data" / "saved"  # by version 0.1.0, of the row x = (2, -1, 0.5)


def test_a_model_predicts_as_it_did() -> None:
    with zipfile.ZipFile(SAVED / "torch_model.zip") as files:
        model = TorchModel.from_files(files.read)
    weight, bias = (parameter.detach().numpy() for parameter in model.getModel().parameters())
    np.testing.assert_allclose(weight, [[1.094791, -1.625034, 0.500570]], rtol=1e-5)
    rows = pd.DataFrame({"x": [np.array([2.0, -1.0, 0.5], np.float32)], "y": [0.0]})
    np.testing.assert_allclose(model.transform(rows)["y__output"], weight @ [2.0, -1.0, 0.5] + bias, rtol=1e-5)


def test_an_estimator_has_its_parameters() -> None:
    with zipfile.ZipFile(SAVED / "torch_estimator.zip") as files:
        estimator = TorchEstimator.from_files(files.read)
    assert (estimator.getRunId(), estimator.getBatchSize(), estimator.getFeatureCols()) == ("run", 4, ["x"])
    store = estimator.getStore()
    assert isinstance(store, LocalStore) and store.get_run_path("run").endswith("/saved/store/runs/run")
