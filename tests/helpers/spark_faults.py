"""Faults in a Spark job: killed ranks and executors, attempts, and Ctrl-C on the driver."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from farandole.spark.driver.messages import send
from farandole.spark.jobs.barrier import run_barrier_job
from helpers.marked import wait_until_gone
from helpers.spark_session import rest

_HANGS = 120.0  # seconds


def fit_with_faults(spark: SparkSession, tmp_path: Path) -> None:
    """Fit without and with faults; check that weights are equal bit for bit, and that Spark shows three attempts."""
    import torch

    from farandole.estimators.store import Store
    from farandole.estimators.torch import TorchEstimator, TorchModel

    def fit(run_id: str, loss: Callable[..., Any]) -> TorchModel:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        return TorchEstimator(
            num_proc=2, model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01), loss=loss,
            feature_cols=["x"], label_cols=["y"], batch_size=4, epochs=3, random_seed=9, verbose=0,
            store=Store.create(str(tmp_path / "store")), run_id=run_id, max_attempts=3,
        ).fit(data)  # fmt: skip

    def executor_of(pid: int) -> int:
        while Path(f"/proc/{pid}/comm").read_text().strip() != "java":
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return pid

    faults = tmp_path / "faults"
    faults.mkdir()
    calls = iter(range(1, 1000))

    def dying(output: Any, label: Any) -> Any:
        if not torch.is_inference_mode_enabled() and next(calls) == 8:  # in the middle of an attempt's second epoch
            rank = int(os.environ["FARANDOLE_RANK"])
            with suppress(FileExistsError):
                (faults / f"attempt of rank {rank}").touch(exist_ok=False)
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                threading.Event().wait(100)
            if rank == 0:
                os.kill(executor_of(os.getpid()), signal.SIGKILL)
                threading.Event().wait(100)
        return torch.nn.functional.mse_loss(output, label)

    rows = [([float(i % 7), float(i % 3)], i / 40) for i in range(40)]
    data = spark.createDataFrame(rows, "x array<double>, y double")
    straight, hit = fit("straight", torch.nn.functional.mse_loss), fit("hit", dying)
    for one, other in zip(straight.getModel().parameters(), hit.getModel().parameters(), strict=True):
        assert torch.equal(one, other)
    assert [record["loss"] for record in straight.history] == [record["loss"] for record in hit.history]
    attempts: dict[int, list[str]] = {}
    for stage in rest(spark, "stages"):
        if "hit" in str(stage.get("description")):
            attempts.setdefault(int(str(stage["stageId"])), []).append(str(stage["status"]))
    assert max(map(sorted, attempts.values()), key=len) == ["COMPLETE", "FAILED", "FAILED"], attempts


def interrupt_job(spark: SparkSession, mark: str) -> None:
    """Press Ctrl-C while a job's ranks wait; check that the call and the ranks, found by `mark`, end at once."""

    def main() -> None:
        send("started", {})
        threading.Event().wait(_HANGS)

    pid, started = os.getpid(), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_barrier_job(
            spark,
            main,
            num_proc=2,
            description="interrupted",
            env={"MARK": mark},
            on_message=lambda rank, message: os.kill(pid, signal.SIGINT) if rank == 0 else None,
        )
    assert time.monotonic() - started < _HANGS
    assert wait_until_gone(mark, 20) == []


def restart_after_a_kill(
    spark: SparkSession, folder: Path, mark: str, *, killed: int = 1, num_proc: int = 2, ranks_per_task: int = 1
) -> None:
    """Kill rank `killed`; check that all ranks, found by `mark`, start again and end."""

    def main() -> str:
        rank = os.environ["FARANDOLE_RANK"]
        try:
            (folder / rank).touch(exist_ok=False)
        except FileExistsError:
            return f"rank {rank}, second time"
        if rank == str(killed):
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(_HANGS)
        return "not reached"

    values = run_barrier_job(
        spark,
        main,
        num_proc=num_proc,
        ranks_per_task=ranks_per_task,
        description="restarted",
        env={"MARK": mark},
        max_attempts=2,
    )
    assert values == [f"rank {rank}, second time" for rank in range(num_proc)]
    assert wait_until_gone(mark, 20) == []


def dying_in_an_allreduce(guilty: int, *, error: Exception | None = None) -> Callable[[], None]:
    """Return a function for ranks that reduce until rank `guilty` kills itself, or raises `error` if given."""

    def main() -> None:
        import numpy as np

        import farandole.numpy as hvd

        hvd.init()
        for step in range(10_000_000):
            hvd.allreduce(np.ones(1000), name="gradient")
            if step == 100 and hvd.rank() == guilty:
                if error is not None:
                    raise error
                os.kill(os.getpid(), signal.SIGKILL)

    return main
