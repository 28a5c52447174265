"""Skips of tests whose packages are not installed, without importing the packages."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest


def require(*packages: str) -> None:
    """Skip the running test, or the importing test module, unless all of `packages` are installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)


def require_imports_of(program: Path) -> None:
    """Skip the running test unless all packages that the Python file `program` imports are installed."""
    packages: set[str] = set()
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            packages.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            packages.add(node.module.partition(".")[0])
    # farandole provides `import horovod`.
    require(*sorted(packages - sys.stdlib_module_names - {"horovod"}))
