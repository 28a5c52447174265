"""Flyte tasks with fitted models. Import it within a test: importing flytekit replaces the handler of Ctrl-C."""

from typing import cast

import pandas as pd
import torch
from flytekit import current_context, task, workflow
from flytekitplugins.spark import Spark

import farandole.integrations.flyte  # noqa: F401  registers the transformer
from farandole.estimators.torch import TorchEstimator, TorchModel


def rows() -> pd.DataFrame:
    return pd.DataFrame({"x": [[float(place)] for place in range(8)], "y": [[2.0 * place] for place in range(8)]})


@task
def fit(epochs: int) -> TorchModel:
    torch.manual_seed(1)
    net = torch.nn.Linear(1, 1)
    return TorchEstimator(
        num_proc=1, model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.01), loss=torch.nn.functional.mse_loss,
        feature_cols=["x"], label_cols=["y"], batch_size=8, epochs=epochs, verbose=0, random_seed=1,
    ).fit(rows()).setOutputCols(["doubled"])  # fmt: skip


@task
def use(model: TorchModel) -> float:
    assert len(model.history) == 2
    return float(cast(pd.DataFrame, model.transform(rows()))["doubled"].iloc[-1])


@workflow
def fitted_and_used() -> tuple[TorchModel, float]:
    model = fit(epochs=2)
    return model, use(model=model)


@task(task_config=Spark(spark_conf={"spark.master": "local[2]", "spark.ui.enabled": "false"}))
def runs_in_spark(value: int) -> int:
    from farandole.spark import HorovodRunner

    def main(given: int) -> int:
        import os

        return given * int(os.environ["FARANDOLE_SIZE"])

    assert current_context().spark_session.sparkContext.master == "local[2]"
    return int(HorovodRunner(np=2, driver_log_verbosity="log_callback_only").run(main, given=value))
