"""Versions that launcher and hosts must share, because they read each other's messages and pickles."""

import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version

__all__ = ["check_versions", "own_versions"]


def own_versions() -> dict[str, str]:
    """Return the versions of farandole and Python in this process, for `check_versions` elsewhere."""
    return {"version": version("farandole"), "python": platform.python_version()}


def check_versions(theirs: Mapping[str, str]) -> None:
    """Raise `OSError`, naming both versions, if a host's farandole or minor version of Python differs."""
    mine = own_versions()
    if theirs["version"] != mine["version"]:
        raise OSError(
            f"it has farandole {theirs['version']} in {sys.executable}, this machine {mine['version']}; "
            "install the same version"
        )
    wanted = _minor(mine["python"])
    if _minor(theirs["python"]) != wanted:
        raise OSError(
            f"{sys.executable} is Python {theirs['python']} there, and {mine['python']} on this machine; start "
            f"farandole by a Python {wanted} that all hosts have"
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
