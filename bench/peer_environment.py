"""Environment of the readers that `bench/files.py` and `bench/data.py` compare with farandole.data.

    python bench/peer_environment.py

Installs SPDL, LitData, Hugging Face datasets, WebDataset and torchdata into `build/readers`, which
shares the packages of this environment: all contenders use the same torch, pyarrow and Pillow. The two benches then
run in it. Without it, they leave these readers out.
"""

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

PLACE = Path(__file__).resolve().parents[1] / "build" / "readers"
PACKAGES = ("spdl-core", "litdata", "polars", "datasets", "webdataset", "torchdata")
# Mosaic Streaming 0.13 requires NumPy < 2.2, so it cannot share these packages. Where it is installed, it takes part.
NAMES = (*PACKAGES, "mosaicml-streaming")


def enter() -> None:
    """Continue this program in `build/readers`, if that exists; returns if it does not, or the program runs there."""
    python = PLACE / "bin" / "python"
    if python.exists() and Path(sys.prefix) != PLACE:
        os.execv(python, [str(python), *sys.argv])


def missing(module: str, *needed: str) -> bool:
    """Return whether a reader's module, or one that it needs, is not installed, and print that it is left out."""
    if all(importlib.util.find_spec(name) is not None for name in (module, *needed)):
        return False
    sys.stdout.write(f"{module} is left out: it is not installed; see bench/peer_environment.py\n")
    return True


def main() -> None:
    """Make the environment, or complete it."""
    venv.create(PLACE, with_pip=True)
    paths = [path for path in sys.path if path.endswith("site-packages")]
    packages = next(PLACE.glob("lib/python*/site-packages"))
    lines = [f"import site; site.addsitedir({path!r})\n" for path in paths if Path(path) != packages]
    (packages / "farandole-readers.pth").write_text("".join(lines), encoding="utf-8")
    constraints = Path(__file__).resolve().parents[1] / "constraints.txt"
    pip = [str(PLACE / "bin" / "pip"), "install", "-q", "-c", str(constraints)]
    subprocess.run([*pip, *PACKAGES], check=True, timeout=1800)


if __name__ == "__main__":
    main()
