"""Run the tests as where some packages are not installed: without.py PACKAGE... [-- pytest's arguments].

Makes a virtual environment below build/ that has all of this one's packages but those, metadata included, so that the
tests' child processes lack them too."""

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
    """Return whether an entry of site-packages is of `package`, such as pyspark-4.0.1.dist-info."""
    return entry == package or entry.startswith((f"{package}-", f"{package}_", f"{package}."))


def _leads_to(entry: Path, sources: Sequence[Path]) -> bool:
    """Return whether a .pth file does nothing but add folders that are looked through anyway."""
    return entry.suffix == ".pth" and {*map(Path, entry.read_text(encoding="utf-8").split("\n")[:-1])} <= {*sources}


def make(folder: Path, packages: Sequence[str]) -> Path:
    """Make the environment anew; returns its Python."""
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
    """Bring along commands written in Python, which name the interpreter that they run with."""
    for command in source.iterdir():
        if (target / command.name).exists() or not command.is_file():
            continue
        first, _, rest = command.read_bytes().partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            (target / command.name).write_bytes(f"#!{target / 'python'}\n".encode() + rest)
            (target / command.name).chmod(0o755)


def main(words: Sequence[str]) -> None:
    """Make the environment, and become its pytest."""
    cut = words.index("--") if "--" in words else len(words)
    packages, arguments = words[:cut], words[cut + 1 :]
    if not packages or packages[0].startswith("-"):
        sys.exit(__doc__)
    python = make(ROOT / "build" / f"without-{'-'.join(packages)}", packages)
    os.execv(python, [str(python), "-m", "pytest", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
