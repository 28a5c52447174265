"""Reasons why modules and names of Horovod, sparkdl and Petastorm are absent."""

from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec

import farandole
from farandole.compat.answers import MODULES
from farandole.refusals import ABSENT_MODULES, ABSENT_NAMES

# By package: the extra that installs it.
_EXTRAS = {
    "pyspark": "spark",
    "torch": "torch",
    "tensorflow": "tensorflow",
    "keras": "keras",
    "lightning_utilities": "lightning",
    "mxnet": "mxnet",
    "ray": "ray",
}


def missing_module(name: str) -> str | None:
    """Return the reason why a module or name of Horovod is absent; None if it is present, or not Horovod's."""
    nearest = name
    while nearest and nearest not in MODULES:
        nearest = nearest.rpartition(".")[0]
    problem = _obstacle(nearest)[0] if nearest else ""
    if problem:
        return f"{name} {problem}"
    # `from horovod.torch import join` asks for a module `horovod.torch.join` when there is no such name.
    module, _, last = name.rpartition(".")
    if nearest == name or module not in MODULES or last in MODULES[module].offered():
        return None
    return missing_name(module, last)


def missing_package(name: str) -> str:
    """Return the package that must be installed for Horovod's module `name`, or ""."""
    return _obstacle(name)[1]


def missing_name(module: str, name: str) -> str | None:
    """Return the reason why `module` lacks `name`; None if Horovod has no such name either."""
    whole, answer = f"{module}.{name}", MODULES[module]
    if why := ABSENT_NAMES.get(module, {}).get(name):
        return f"{whole} {_absent(why)}"
    if name in answer.known.split():
        return f"{whole} {_absent('this version does not have it yet')}"
    return missing_module(whole) if whole in MODULES else None


def _obstacle(module: str) -> tuple[str, str]:
    """Return why a module of the table is absent, as the end of a sentence, and the package that it lacks or ""."""
    above = module.rpartition(".")[0]
    if above in MODULES and (obstacle := _obstacle(above))[0]:
        return obstacle  # the import of the package would fail first
    answer = MODULES[module]
    if module in ABSENT_MODULES and not (answer.by and _exists(answer.by)):
        return _absent(ABSENT_MODULES[module]), ""
    for package in answer.needs.split():
        if find_spec(package) is None:
            return f"needs {package}, which is not installed: pip install 'farandole[{_EXTRAS[package]}]'", package
    return "", ""


def _absent(why: str) -> str:
    return f"is not part of farandole {farandole.__version__}: {why}"


def _exists(module: str) -> bool:
    """Return whether a module of farandole exists. Imports nothing: a parent may need a package that is missing."""
    path: Sequence[str] | None = farandole.__path__
    name = farandole.__name__
    for part in module.split(".")[1:]:
        name = f"{name}.{part}"
        found = PathFinder.find_spec(name, path)
        if found is None:
            return False
        path = found.submodule_search_locations
    return True
