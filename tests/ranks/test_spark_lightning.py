"""The trainer of `LightningEstimator` on two ranks, without Spark."""

import inspect
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")
pytest.importorskip("lightning")

from farandole.config import Config
from farandole.core.context import Context
from helpers.ranks import run_ranks


@pytest.mark.timeout(300)
def test_two_ranks(tmp_path: Path) -> None:
    patience = Config(collective_timeout=timedelta(seconds=60))
    done = run_ranks(2, check_everything, tmp_path, how="processes", config=patience, timeout=240.0, framework="torch")
    assert done[0] == done[1] != []


def check_everything(context: Context, folder: Path) -> list[str]:
    from helpers import lightning_estimator

    done = []
    for name, check in inspect.getmembers(lightning_estimator, inspect.isfunction):
        if name.startswith("check_"):
            (folder / name).mkdir(exist_ok=True)
            check(context.rank, context.size, folder / name)
            done.append(name)
    return done
