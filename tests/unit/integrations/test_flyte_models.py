"""Fitted models as outputs and inputs of Flyte's tasks, executed by flytekit."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("pandas")
pytest.importorskip("pyspark")
if importlib.util.find_spec("farandole._native") is None:
    pytest.skip("the native core is not built", allow_module_level=True)

from farandole.errors import ConfigError
from helpers.estimator_rows import settled_torch
from helpers.flyte import IGNORED_FOLDERS, loop
from helpers.installed import require

require("flytekitplugins")

pytestmark = pytest.mark.filterwarnings(IGNORED_FOLDERS)
event_loop = pytest.fixture(scope="module", autouse=True)(loop)
settled = pytest.fixture(scope="module", autouse=True)(settled_torch)


def model_of(kind: Any) -> Any:
    import torch

    return kind(model=torch.nn.Linear(2, 1), feature_columns=["x"], label_columns=["y"])


def test_a_task_takes_the_model_that_another_has_fitted() -> None:
    from farandole.estimators.torch import TorchModel
    from helpers.flyte_models import fitted_and_used, rows

    model, last = fitted_and_used()
    assert isinstance(model, TorchModel)
    assert model.getOutputCols() == ["doubled"] and model.history[1]["loss"] < model.history[0]["loss"]
    assert model.transform(rows())["doubled"].iloc[-1] == last


def test_a_model_is_a_folder_whatever_its_class(tmp_path: Path) -> None:
    from flytekit import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine

    import farandole.integrations.flyte  # noqa: F401  registers the transformer
    from farandole.estimators.estimator import DataFrameEstimator
    from farandole.estimators.torch import TorchEstimator, TorchModel
    from farandole.estimators.transformer import DataFrameModel

    ctx, made = FlyteContextManager.current_context(), model_of(TorchModel)
    kind = TypeEngine.to_literal_type(TorchModel)
    literal = TypeEngine.to_literal(ctx, made, TorchModel, kind)
    assert {each.name for each in Path(literal.scalar.blob.uri).iterdir()} == {"metadata", "model.pt"}
    again = TypeEngine.to_python_value(ctx, literal, DataFrameModel)  # a class above it
    assert (type(again), again.uid) == (TorchModel, made.uid)
    with pytest.raises(ConfigError, match=r"files: are those of a farandole.*TorchModel, not of a .*Estim"):
        TypeEngine.to_python_value(ctx, literal, DataFrameEstimator)

    estimator = TorchEstimator(epochs=7, loss=print)
    literal = TypeEngine.to_literal(ctx, estimator, TorchEstimator, TypeEngine.to_literal_type(TorchEstimator))
    assert TypeEngine.to_python_value(ctx, literal, TorchEstimator).getEpochs() == 7
