"""The package's face: what it offers, and what importing it does not do."""

import ast
import subprocess
import sys
from pathlib import Path

import farandole
from farandole.config import Config


def test_the_public_surface() -> None:
    assert farandole.__all__ == ["Config", "__version__", "errors", "run"]
    assert dir(farandole) == farandole.__all__
    assert farandole.Config is Config
    assert farandole.__version__.count(".") == 2


def test_run_is_brought_along_on_demand() -> None:
    assert farandole.run.__module__ == "farandole.launch.run"


def test_what_is_not_there() -> None:
    try:
        farandole.allreduce  # noqa: B018
    except AttributeError as error:
        assert str(error) == "module 'farandole' has no attribute 'allreduce'"
    else:
        raise AssertionError("operations belong to farandole.torch and its siblings")


IMPORT = """
import os, sys, threading, signal
handlers = {each: signal.getsignal(each) for each in signal.valid_signals()}
environment, modules = dict(os.environ), set(sys.modules)
import farandole
print(sorted({each.partition(".")[0] for each in set(sys.modules) - modules} - set(sys.stdlib_module_names)))
print(sorted(each for each in sys.modules if each.startswith("farandole")))
print(dict(os.environ) == environment, threading.active_count())
print({each: signal.getsignal(each) for each in signal.valid_signals()} == handlers)
"""


def test_importing_it_loads_nothing_and_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    packages, ours, unchanged, handlers = done.stdout.splitlines()
    assert ast.literal_eval(packages) == ["farandole"]
    assert ast.literal_eval(ours) == [
        "farandole",
        "farandole.config",
        "farandole.errors",
        "farandole.masking",
        "farandole.refusals",
        "farandole.settings",
    ]
    assert unchanged == "True 1"
    assert handlers == "True"


def test_it_is_typed() -> None:
    assert Path(farandole.__file__).with_name("py.typed").exists()
