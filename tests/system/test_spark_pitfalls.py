"""Complaints of Horovod's users on Spark: no file before training, ranks are Spark's tasks."""

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from pyspark.sql import SparkSession
from torch import Tensor

from farandole.errors import RankFailed
from farandole.estimators.torch import TorchEstimator
from helpers.estimator_rows import settled_torch
from helpers.spark_session import last_job, tasks_of

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(180)]

settled = pytest.fixture(scope="module", autouse=True)(settled_torch)


def test_rows_go_through_no_files_that_stay_and_ranks_are_tasks(
    spark: SparkSession, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = tmp_path / "seen"
    seen.mkdir()

    def files() -> set[str]:
        return {str(path) for root in (scratch, tmp_path) for path in root.rglob("*.parquet")}

    def loss(output: Tensor, label: Tensor) -> Tensor:
        (seen / f"{os.environ['FARANDOLE_RANK']} {len(files())}").touch()
        return F.mse_loss(output, label)

    def killed(output: Tensor, label: Tensor) -> Tensor:
        if os.environ["FARANDOLE_RANK"] == "1" and not torch.is_inference_mode_enabled():
            os.kill(os.getpid(), signal.SIGKILL)
        return F.mse_loss(output, label)

    model = torch.nn.Linear(1, 1)
    estimator = TorchEstimator(
        num_proc=2, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), loss=loss,
        feature_cols=["x"], label_cols=["y"], verbose=0, max_attempts=1, run_id="sales-7",
    )  # fmt: skip
    data = spark.createDataFrame([([float(i)], [2.0 * i]) for i in range(40)], "x array<double>, y array<double>")
    estimator.fit(data)
    assert {each.name for each in seen.iterdir()} == {"0 0", "1 0"}
    assert "sales-7" in str(last_job(spark)["description"])

    with pytest.raises(RankFailed, match="rank 1 failed: was killed by SIGKILL"):
        estimator.fit(data, {estimator.loss: killed})
    tasks = tasks_of(spark, last_job(spark), count=2)
    assert tasks[1]["status"] == "FAILED" and "rank 1" in str(tasks[1]["errorMessage"])
    assert files() == set()
    assert [each.name for each in tmp_path.iterdir()] == ["seen"]
