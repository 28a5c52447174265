"""The trainer of `LightningEstimator` on two ranks, without Spark."""

import inspect
import time
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")
pytest.importorskip("lightning")

from farandole.config import Config
from farandole.core.context import Context
from helpers.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks(tmp_path: Path) -> None:
    patience = Config(collective_timeout=timedelta(seconds=60))
    done = run_ranks(2, check_everything, tmp_path, how="processes", config=patience, timeout=240.0, framework="torch")
    assert done[0] == done[1] != []


@pytest.mark.timeout(120)
def test_a_checkpoint_with_objects_is_refused(tmp_path: Path) -> None:
    (said,) = run_ranks(1, keep_objects, tmp_path, how="processes", timeout=90.0, framework="torch")
    assert said.startswith("callbacks: a checkpoint may hold tensors and plain values only")


@pytest.mark.timeout(200)
def test_checkpoints_of_failures_wait_for_no_rank(tmp_path: Path) -> None:
    patience = Config(collective_timeout=timedelta(seconds=60))
    started = time.monotonic()
    first, second = run_ranks(
        2, fail_with_checkpoints, tmp_path, how="processes", config=patience, timeout=150.0, framework="torch"
    )
    assert (first[0], second[0]) == ("PeerLost", "ArithmeticError")
    assert any("step=2" in name for name in first[1])
    assert time.monotonic() - started < 60


def fail_with_checkpoints(context: Context, folder: Path) -> tuple[str, list[str]]:
    from helpers.lightning_failures import fail_with_checkpoints

    return fail_with_checkpoints(context.rank, context.size, folder)


def keep_objects(context: Context, folder: Path) -> str:
    from helpers.lightning_details import keep_objects

    return keep_objects(folder)


def check_everything(context: Context, folder: Path) -> list[str]:
    from helpers import lightning_details, lightning_estimator

    done = []
    checks = [each for module in (lightning_estimator, lightning_details) for each in inspect.getmembers(module)]
    for name, check in checks:
        if name.startswith("check_"):
            (folder / name).mkdir(exist_ok=True)
            check(context.rank, context.size, folder / name)
            done.append(name)
    return done
