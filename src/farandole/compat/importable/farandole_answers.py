"""Function that the packages beside this file call. Older Pythons, without farandole, must be able to run it."""

import importlib
import os
import sys


def answer(package: str) -> None:
    """Install compat, and let it answer the import of `package`, which is under way.

    Below a launcher of farandole raises `RuntimeError` if this Python cannot import farandole. After an ImportError
    programs would go on without Horovod, and train alone on each rank."""
    launcher = os.environ.get("FARANDOLE_LAUNCHER")
    # After the package's file has run, the import system returns the module that is in sys.modules.
    del sys.modules[package]
    try:
        importlib.import_module("farandole.compat").install()
        if launcher:
            importlib.import_module("farandole.core.default")  # needs the compiled module
    except ImportError as error:
        if not launcher:
            raise
        raise RuntimeError(
            f"import {package}: {sys.executable} cannot import farandole ({error}), but the launcher, {launcher}, has "
            f"started it as a rank. Install farandole for it ({sys.executable} -m pip install farandole), or start the "
            "program with the launcher's Python"
        ) from error
    importlib.import_module(package)
