"""Runner for the checks of modules in `helpers`, on two ranks with one backend of Keras."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from farandole.config import Config
from farandole.core.context import Context
from helpers.ranks import run_ranks

# The other two compile each model, for a minute in all.
BACKENDS = ["torch", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tensorflow", "jax"))]

# Modules that ranks start with, by backend. Keras imports TensorFlow with each backend, to save a model.
FRAMEWORK_OF = {"tensorflow": "tensorflow", "torch": "any", "jax": "any"}


def run_checks(
    backend: str, modules: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, *, patience: float = 60.0
) -> None:
    """Run each `check_...(rank, size[, folder])` of `helpers.<module>`; skip if Keras or the backend is missing.

    Ranks are processes, because a process has one backend. A collective waits for `patience` seconds at most, so that
    the failure of one rank does not make the other wait for long."""
    for package in ("keras", backend):  # found without importing them
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    done = run_ranks(
        2,
        _check_everything,
        modules,
        folder,
        how="processes",
        config=Config(collective_timeout=timedelta(seconds=patience)),
        timeout=360.0,
        framework=FRAMEWORK_OF[backend],
    )
    assert done[0] == done[1] != []


def _check_everything(context: Context, modules: list[str], folder: Path) -> list[str]:
    done = []
    for module in modules:
        for name, check in list(vars(importlib.import_module(f"helpers.{module}")).items()):
            if name.startswith("check_"):
                _run(check, context, folder / f"{module}.{name}")
                done.append(f"{module}.{name}")
    return done


def _run(check: Callable[..., Any], context: Context, own: Path) -> None:
    if "folder" in inspect.signature(check).parameters:
        own.mkdir(exist_ok=True)
        check(context.rank, context.size, own)
    else:
        check(context.rank, context.size)
