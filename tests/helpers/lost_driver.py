"""A Spark application that fits a model, for a test that kills its driver."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

EPOCHS, STEPS = 4, 5  # of each rank


def fit(spark: SparkSession, folder: Path, run_id: str, *, hang: bool = False) -> Any:
    """Fit a model whose ranks write their steps below `folder`; with `hang` they wait in the third epoch."""
    import torch

    from farandole.estimators.store import Store
    from farandole.estimators.torch import TorchEstimator

    def loss(output: Any, label: Any) -> Any:
        import threading

        rank = os.environ["FARANDOLE_RANK"]
        with (folder / f"{run_id}-{rank}").open("a") as steps:
            steps.write(".")
        if hang and (folder / f"{run_id}-{rank}").stat().st_size > 2 * STEPS + 1:
            (folder / f"hangs-{rank}").touch()
            threading.Event().wait(100)
        return torch.nn.functional.mse_loss(output, label)

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    rows = [([float(i % 7)], i / 40) for i in range(40)]
    return TorchEstimator(
        num_proc=2, model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01), loss=loss,
        feature_cols=["x"], label_cols=["y"], batch_size=4, epochs=EPOCHS, random_seed=9, verbose=0,
        store=Store.create(str(folder / "store")), run_id=run_id, max_attempts=1,
    ).fit(spark.createDataFrame(rows, "x array<double>, y double"))  # fmt: skip


def fit_and_hang(folder: str, disk: str, java_options: str) -> None:
    """Run the driver of an application with two executors, whose ranks hang."""
    builder = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.driver.host", "127.0.0.1")
    for name, value in {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": java_options,
        "spark.executor.extraJavaOptions": java_options,
        "spark.local.dir": disk,
        "spark.log.level": "OFF",
        "spark.ui.enabled": "false",
    }.items():
        builder = builder.config(name, value)
    fit(builder.getOrCreate(), Path(folder), "lost", hang=True)


def kill_driver(folder: Path, disk: Path, java_options: str, mark: str) -> Sequence[str]:
    """Run `fit_and_hang` until its ranks hang, then kill the driver's Python and Java, as when its pod is lost.

    Returns the driver's output. Its processes have `mark` in their environment."""
    program = (
        f"from helpers.lost_driver import fit_and_hang; fit_and_hang({str(folder)!r}, {str(disk)!r}, {java_options!r})"
    )
    env = {**os.environ, "MARK": mark, "TMPDIR": str(disk), "PYTHONPATH": str(Path(__file__).parents[1])}
    env |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            deadline = time.monotonic() + 300.0
            while len(list(folder.glob("hangs-*"))) < 2 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for pid in [*map(int, children), process.pid]:
                os.kill(pid, signal.SIGKILL)
        return process.communicate()[0].splitlines()
