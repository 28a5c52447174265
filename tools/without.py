"""Run the tests without some installed packages: without.py PACKAGE... [-- PYTEST ARGUMENT...].

The tool makes a virtual environment below build/ with links to all packages of the current one, and their metadata, but
the named ones. The tests' child processes therefore lack these packages too."""

import os
import shutil
import sys
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def site_packages(paths: Sequence[str]) -> Iterator[Path]:
    """Yield the folders of `paths` in which packages are installed."""
    for path in map(Path, paths):
        if path.name in ("site-packages", "dist-packages") and path.is_dir():
            yield path


def belongs_to(entry: str, package: str) -> bool:
    """Return whether an entry of site-packages, such as pyspark-4.0.1.dist-info, belongs to `package`."""
    return entry == package or entry.startswith((f"{package}-", f"{package}_", f"{package}."))


def _leads_to(entry: Path, sources: Sequence[Path]) -> bool:
    """Return whether `entry` is a .pth file that only adds folders of `sources`, which are linked anyway."""
    return entry.suffix == ".pth" and {*map(Path, entry.read_text(encoding="utf-8").split("\n")[:-1])} <= {*sources}


def make(folder: Path, packages: Sequence[str]) -> Path:
    """Make the environment in `folder`, replacing an old one; return the path of its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False)
    (target,) = folder.glob("lib/python*/site-packages")
    sources = list(site_packages(sys.path))
    for entry in (entry for source in sources for entry in source.iterdir()):
        link = target / entry.name
        hidden = _leads_to(entry, sources) or any(belongs_to(entry.name, package) for package in packages)
        if not hidden and not link.is_symlink():
            link.symlink_to(entry)
    _copy_commands(Path(sys.executable).parent, folder / "bin")
    return folder / "bin" / "python"


def _copy_commands(source: Path, target: Path) -> None:
    """Copy commands written in Python, with the new environment's interpreter in their first line."""
    for command in source.iterdir():
        if (target / command.name).exists() or not command.is_file():
            continue
        first, _, rest = command.read_bytes().partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            (target / command.name).write_bytes(f"#!{target / 'python'}\n".encode() + rest)
            (target / command.name).chmod(0o755)


def main(words: Sequence[str]) -> None:
    """Make the environment, and replace this process by its pytest."""
    cut = words.index("--") if "--" in words else len(words)
    packages, arguments = words[:cut], words[cut + 1 :]
    if not packages or packages[0].startswith("-"):
        sys.exit(__doc__)
    python = make(ROOT / "build" / f"without-{'-'.join(packages)}", packages)
    os.execv(python, [str(python), "-m", "pytest", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
