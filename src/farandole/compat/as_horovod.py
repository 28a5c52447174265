"""The command `farandole as-horovod`: installs tiny packages `horovod`, `sparkdl` and `petastorm` into an environment.

With them farandole answers these imports in every process of the environment, and installers know the packages."""

import argparse
import base64
import hashlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distributions
from pathlib import Path

from farandole.compat.answers import IMPORTABLE, PACKAGES, PETASTORM_VERSION, VERSION
from farandole.compat.hook import INSTALLER, is_stand_in
from farandole.errors import ConfigError
from farandole.launch.options import CommandParser

# The releases whose interface compat has.
VERSIONS = {"horovod": VERSION, "sparkdl": "3.0.0", "petastorm": PETASTORM_VERSION}

_CODE = '''"""Package of `farandole as-horovod`: gives way to the answers of farandole."""

import importlib
import sys

del sys.modules[__name__]
importlib.import_module("farandole.compat").install()
importlib.import_module(__name__)
'''

_METADATA = """Metadata-Version: 2.1
Name: {name}
Version: {version}
Summary: farandole under the name of {name}; `farandole as-horovod remove` removes it
Requires-Dist: farandole
"""


def install(folder: Path, names: Sequence[str] = PACKAGES) -> list[str]:
    """Install the packages `names` into `folder`, a site-packages; return a sentence for each.

    Raises `ConfigError`, and installs none, if another package of one of the names is installed, or if the folder
    cannot be written."""
    for name in names:
        _refuse_another(name, folder)
    missing = next(each for each in (folder, *folder.parents) if each.exists())
    if not os.access(missing, os.W_OK):
        raise ConfigError(
            "as-horovod",
            f"{missing} is not writable: run the farandole of a virtual environment of your own, or give a folder that "
            "PYTHONPATH names: --target DIR",
        )
    remove(folder, names)  # those of another version of farandole
    for name in names:
        _write(folder, name)
    return [f"{name} {VERSIONS[name]}: installed in {folder}" for name in names]


def remove(folder: Path, names: Sequence[str] = PACKAGES) -> list[str]:
    """Remove what `install` has put into `folder`; return a sentence for each. Other packages stay."""
    said = []
    for name in names:
        found = _distribution(name, folder)
        if found is not None and is_stand_in(found):
            for each in (folder / name, *folder.glob(f"{name}-*.dist-info")):
                shutil.rmtree(each)
            said.append(f"{name}: removed from {folder}")
        else:
            said.append(f"{name}: none of farandole's in {folder}")
    return said


def status(folder: Path, names: Sequence[str] = PACKAGES) -> list[str]:
    """Return a sentence for each name: whose package it is in `folder`."""
    said = []
    for name in names:
        found = _distribution(name, folder)
        whose = "not installed" if found is None else "farandole's" if is_stand_in(found) else "another package"
        said.append(f"{name}{f' {found.version}' if found else ''}: {whose}")
    return said


def as_horovod_parser() -> argparse.ArgumentParser:
    """Return the parser of `farandole as-horovod`."""
    parser = CommandParser(
        prog="farandole as-horovod",
        description="Install tiny packages horovod, sparkdl and petastorm, whose imports farandole\n"
        "answers, or remove them, or say whose packages of these names are installed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["install", "remove", "status"])
    parser.add_argument(
        "names", nargs="*", type=_known, default=PACKAGES, metavar="NAME", help="one of the three (default: all)"
    )
    parser.add_argument("--target", type=Path, metavar="DIR", help="folder (default: site-packages of this Python)")
    return parser


def run_as_horovod(words: Sequence[str]) -> int:
    """Run `farandole as-horovod` with the arguments `words`; return the exit code."""
    given = as_horovod_parser().parse_args(words)
    folder = (given.target or Path(sysconfig.get_path("purelib"))).absolute()
    act = {"install": install, "remove": remove, "status": status}[given.what]
    try:
        said = act(folder, given.names)
    except (ConfigError, OSError) as error:
        named = error if isinstance(error, ConfigError) else f"as-horovod: cannot change {folder}: {error}"
        sys.stderr.write(f"farandole {named}\n")
        return 2
    sys.stdout.write("".join(f"{each}\n" for each in said))
    return 0


def _known(name: str) -> str:
    if name not in PACKAGES:
        raise argparse.ArgumentTypeError(f"unknown package {name}; choose from {', '.join(PACKAGES)}")
    return name


def _distribution(name: str, folder: Path) -> Distribution | None:
    return next(iter(distributions(name=name, path=[str(folder)])), None)


def _refuse_another(name: str, folder: Path) -> None:
    """Raise `ConfigError` if a package `name` that is not of this command is in `folder` or on this Python's path."""
    paths = [str(folder), *(each for each in sys.path if each != str(IMPORTABLE))]
    found = next(iter(distributions(name=name, path=paths)), None)
    spec = None if found is not None else PathFinder.find_spec(name, paths)
    if found is not None and not is_stand_in(found):
        which, where = f"{name} {found.version}", found.locate_file("")
    elif spec is not None and spec.origin is not None:
        which, where = name, Path(spec.origin).parent
    else:
        return
    others = " ".join(each for each in PACKAGES if each != name)
    raise ConfigError(
        "as-horovod",
        f"{which} is installed in {where}: uninstall it (python -m pip uninstall {name}), or leave it and name the "
        f"others: farandole as-horovod install {others}",
    )


def _write(folder: Path, name: str) -> None:
    facts = folder / f"{name}-{VERSIONS[name]}.dist-info"
    files = {
        folder / name / "__init__.py": _CODE,
        facts / "METADATA": _METADATA.format(name=name, version=VERSIONS[name]),
        facts / "INSTALLER": f"{INSTALLER}\n",
        facts / "top_level.txt": f"{name}\n",
    }
    rows = [f"{facts.name}/RECORD,,\n"]
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path.relative_to(folder).as_posix()},sha256={digest},{len(text)}\n")
    (facts / "RECORD").write_text("".join(rows), encoding="utf-8")
