"""Versions that launcher and hosts must share, because they read each other's messages and pickles."""

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of farandole and Python in a process."""

    farandole: str
    python: str


def own_versions() -> Versions:
    """Return the versions of farandole and Python in this process, for `check_versions` elsewhere."""
    return Versions(version("farandole"), platform.python_version())


def check_fields(fields: Mapping[str, object]) -> None:
    """Check the versions among the fields of an agent's `Hello`, whose other fields another farandole may not share.

    Raises `OSError` like `check_versions`, also if the fields name no versions."""
    found = fields.get("versions")
    versions = found if isinstance(found, dict) else {}
    names = ("farandole", "python")
    check_versions(Versions(*(str(versions.get(name, "of an unknown version")) for name in names)))


def check_versions(theirs: Versions) -> None:
    """Raise `OSError`, naming both versions, if a host's farandole or minor version of Python differs."""
    mine = own_versions()
    if theirs.farandole != mine.farandole:
        raise OSError(
            f"it has farandole {theirs.farandole} in {sys.executable}, this machine {mine.farandole}; "
            "install the same version"
        )
    wanted = _minor(mine.python)
    if _minor(theirs.python) != wanted:
        raise OSError(
            f"{sys.executable} is Python {theirs.python} there, and {mine.python} on this machine; start "
            f"farandole by a Python {wanted} that all hosts have"
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
