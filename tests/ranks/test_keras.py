"""farandole.keras on each backend of Keras; the backend is a process' choice, so the ranks are processes."""

import importlib.util
import inspect
from datetime import timedelta
from pathlib import Path

import pytest

from farandole.config import Config
from farandole.core.context import Context
from helpers.ranks import run_ranks
from helpers.warm import FRAMEWORKS

CASES = ("keras_training", "keras_callbacks", "keras_values")


def check_everything(context: Context, folder: Path) -> int:
    done = 0
    for name in CASES:
        module = importlib.import_module(f"helpers.{name}")
        for case, check in list(vars(module).items()):
            if case.startswith("check_"):
                wants_folder = "folder" in inspect.signature(check).parameters
                check(context.rank, context.size, *([folder] if wants_folder else []))
                done += 1
    return done


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_two_ranks(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("keras", backend):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    # So that one rank's failure is not reported after the other's long wait.
    config = Config(collective_timeout=timedelta(seconds=60))
    framework = backend if backend in FRAMEWORKS else None
    done = run_ranks(2, check_everything, tmp_path, how="processes", config=config, timeout=360.0, framework=framework)
    assert done[0] == done[1] > 0
