"""The trainer of `KerasEstimator` on each backend of Keras; the backend is a process' choice."""

import importlib.util
import inspect
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from farandole.config import Config
from farandole.core.context import Context
from helpers.ranks import run_ranks
from helpers.warm import FRAMEWORKS


def check_everything(context: Context, folder: Path) -> list[str]:
    module = importlib.import_module("helpers.keras_estimator")
    checks = {name: check for name, check in vars(module).items() if name.startswith("check_")}
    for name, check in checks.items():
        own = folder / name
        own.mkdir(exist_ok=True)
        assert len(inspect.signature(check).parameters) == 3
        check(context.rank, context.size, own)
    return sorted(checks)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_two_ranks(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("keras", backend):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    config = Config(collective_timeout=timedelta(seconds=60))
    framework = backend if backend in FRAMEWORKS else None
    done = run_ranks(2, check_everything, tmp_path, how="processes", config=config, timeout=360.0, framework=framework)
    assert done[0] == done[1] != []
