"""Report of `farandole run --check-build`: the installed parts of farandole and the frameworks they work with."""

from importlib.util import find_spec

import farandole

__all__ = ["report"]

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
    """Return the list of native core, frameworks and launchers, each with [X] when it can be used."""
    lines = [f"farandole {farandole.__version__}", "", "Native core:", _mark("farandole._native", _found("_native"))]
    lines += ["", "Frameworks:"]
    lines += [_mark(title, _found(package) and find_spec(package) is not None) for title, package in BINDINGS]
    lines += ["", "Launchers:", _mark("this machine", True)]
    lines += [_mark("Spark", _found("spark") and find_spec("pyspark") is not None), ""]
    return "\n".join(lines)


def _found(part: str) -> bool:
    return find_spec(f"farandole.{part}") is not None


def _mark(title: str, there: bool) -> str:
    return f"    [{'X' if there else ' '}] {title}"
