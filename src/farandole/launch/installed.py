"""Report of `farandole run --check-build`: the installed parts of farandole and the frameworks they work with."""

import os
import shutil
import sys
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

import farandole
from farandole.other_launchers import PROGRAMS

# A binding works when its own package and its framework are installed; neither is imported for the report.
BINDINGS = (
    ("PyTorch", "torch"),
    ("TensorFlow", "tensorflow"),
    ("Keras", "keras"),
    ("JAX", "jax"),
    ("MXNet", "mxnet"),
    ("Lightning", "lightning"),
    ("NumPy", "numpy"),
)


def report() -> str:
    """Return a text that lists native core, frameworks and launchers, with [X] for each that can be used."""
    lines = [f"farandole {farandole.__version__}", "", "Native core:", _mark("farandole._native", _found("_native"))]
    lines += ["", "Frameworks:"]
    for title, package in BINDINGS:
        there = _found(package) and find_spec(package) is not None
        lines.append(_mark(f"{title} {installed_version(package)}" if there else title, there))
    lines += ["", "Launchers:", _mark("this machine", True)]
    lines.append(_mark("other machines by ssh", program_path("ssh") is not None))
    lines += [_mark(name, program_path(name) is not None) for name in PROGRAMS]
    lines += [_mark("Spark", _found("spark") and find_spec("pyspark") is not None)]
    return "\n".join([*lines, "", "farandole doctor shows more, and what does not work.", ""])


def installed_version(package: str) -> str:
    """Return the version of the distribution that has installed `package`; "" if none has."""
    names = packages_distributions().get(package, [])
    return version(names[0]) if names else ""


def program_path(name: str) -> str | None:
    """Return the program's file, beside this Python or on PATH; None if there is none."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}")


def _found(part: str) -> bool:
    return find_spec(f"farandole.{part}") is not None


def _mark(title: str, there: bool) -> str:
    return f"    [{'X' if there else ' '}] {title}"
