"""`LightningEstimator` and `LightningModel` on an embedded Spark, with real ranks."""

import importlib.util
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")
pytest.importorskip("lightning")
if importlib.util.find_spec("farandole._native") is None:
    pytest.skip("the native core is not built", allow_module_level=True)

import lightning.pytorch as lightning
import numpy as np
import torch
from pyspark.sql import DataFrame, SparkSession
from torch import Tensor, nn

from farandole.estimators.lightning import LightningEstimator, LightningModel
from farandole.estimators.store import FilesystemStore, Store
from helpers.spark_session import last_job

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def warm_torch() -> None:
    # The first optimizer makes torch set a variable of its compiler, for good.
    torch.optim.SGD(nn.Linear(1, 1).parameters())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FilesystemStore:
    return Store.create(str(tmp_path_factory.mktemp("lightning") / "store"))


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    data = [([float(i % 7), float(i % 3)], i / 40, i) for i in range(40)]
    return spark.createDataFrame(data, "x array<double>, y double, id bigint").repartition(3)


def net(dies: Path | None = None) -> Any:
    # Made in a function, so that it is pickled by value: ranks cannot import this file.
    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            return nn.functional.mse_loss(self(batch["x"]).squeeze(1), batch["y"])

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            if dies is not None and self.global_rank == 1 and (self.current_epoch, batch_idx) == (1, 1):
                with suppress(FileExistsError):
                    dies.touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
            return self.loss(batch)

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    return Net()


def estimator(store: FilesystemStore, run_id: str, model: Any, **changes: Any) -> LightningEstimator:
    settings: dict[str, Any] = {
        "num_proc": 2, "feature_cols": ["x"], "label_cols": ["y"], "batch_size": 4, "epochs": 3, "random_seed": 9,
        "validation": 0.2, "verbose": 0, "store": store, "run_id": run_id, "model": model,
    }  # fmt: skip
    return LightningEstimator(**(settings | changes))


@pytest.fixture(scope="module")
def fitted(rows: DataFrame, store: FilesystemStore) -> LightningModel:
    return estimator(store, "straight", net()).fit(rows)


def test_a_fitted_model_predicts_and_is_saved(
    spark: SparkSession, rows: DataFrame, fitted: LightningModel, store: FilesystemStore, tmp_path: Path
) -> None:
    assert [record["epoch"] for record in fitted.history] == [1, 2, 3]
    assert fitted.getHistory().keys() == {"loss", "val_loss"}
    assert fitted.getHistory()["val_loss"] == fitted.history[-1]["val_loss"]
    before = last_job(spark)["jobId"]
    predicted = fitted.transform(rows)
    assert predicted.schema["y__output"].dataType.simpleString() == "double"
    assert last_job(spark)["jobId"] == before, "the schema is known without a job"
    again = estimator(store, "straight", net())
    again.write().overwrite().save(str(tmp_path / "estimator"))
    assert LightningEstimator.load(str(tmp_path / "estimator")).fit(rows).history == fitted.history
    fitted.save(str(tmp_path / "model"))
    loaded = LightningModel.load(str(tmp_path / "model"))
    model = loaded.getModel().eval()
    for row in loaded.transform(rows).collect():
        with torch.no_grad():
            want = model(torch.tensor([row["x"]])).item()
        np.testing.assert_allclose(row["y__output"], want, rtol=1e-5, atol=1e-6)
    events = [path.name for path in Path(store.get_logs_path("straight")).iterdir()]
    assert len(events) == 1
    assert events[0].startswith("events.out.tfevents")


def test_a_killed_rank_is_repeated_with_the_same_result(
    rows: DataFrame, fitted: LightningModel, store: FilesystemStore, tmp_path: Path
) -> None:
    hit = estimator(store, "hit", net(tmp_path / "died")).fit(rows)
    assert (tmp_path / "died").exists()
    for one, other in zip(fitted.getModel().parameters(), hit.getModel().parameters(), strict=True):
        assert torch.equal(one, other)
    assert [record["val_loss"] for record in hit.history] == [record["val_loss"] for record in fitted.history]
