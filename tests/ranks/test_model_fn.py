"""Model functions of TensorFlow 1 on two ranks: `HorovodEstimator` without Spark."""

import importlib.util
import inspect
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from farandole.config import Config
from farandole.core.context import Context
from helpers.ranks import run_ranks


def check_everything(context: Context, folder: Path) -> list[str]:
    module = importlib.import_module("helpers.model_fn")
    checks = {name: check for name, check in vars(module).items() if name.startswith("check_")}
    for name, check in checks.items():
        own = folder / name
        own.mkdir(exist_ok=True)
        assert len(inspect.signature(check).parameters) == 3
        check(context.rank, context.size, own)
    return sorted(checks)


@pytest.mark.timeout(400)
def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("keras", "tensorflow"):  # this process has no need of them
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    config = Config(collective_timeout=timedelta(seconds=120))
    done = run_ranks(
        2, check_everything, tmp_path, how="processes", config=config, timeout=360.0, framework="tensorflow"
    )
    assert done[0] == done[1] != []
