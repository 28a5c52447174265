"""Run tests with the oldest dependencies that pyproject.toml promises: oldest.py [pytest's arguments].

Makes a virtual environment below build/ with this one's farandole, and with its dependencies in the lowest versions
that `dependencies` and the extras in `EXTRAS` allow. Frameworks and Spark are absent. The environment is kept until a
version changes."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "oldest"
EXTRAS = ("data", "prometheus", "spark")
ABSENT = ("pyspark",)  # 400 MB; its tests take minutes
TOOLS = ("hypothesis", "pytest", "pytest-timeout")
TESTS = (
    "tests/unit/test_compat_util.py",
    "tests/unit/test_data_*.py",
    "tests/unit/test_imports.py",
    "tests/unit/test_launch_pickling.py",
    "tests/unit/test_surface.py",
    "tests/conformance/test_movement.py",
    "tests/conformance/test_objects.py",
    "tests/conformance/test_reductions.py",
    "tests/conformance/test_shared.py",
    "tests/ranks/test_data_*.py",
)


def lowest(requirements: Iterable[str]) -> list[str]:
    """Turn requirements such as "pandas>=2.2,<3" into pins of their lower bounds: "pandas==2.2"."""
    pins = []
    for requirement in requirements:
        found = re.match(r"([\w.-]+)>=([\w.]+)", requirement)
        if found is None:
            sys.exit(f"oldest: {requirement!r} in pyproject.toml has no lower bound; write it as name>=version")
        pins.append(f"{found[1]}=={found[2]}")
    return sorted(set(pins))


def name_of(requirement: str) -> str:
    """Return the name of a requirement, as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>!~;\[ ]", requirement, maxsplit=1)[0]).lower()


def promised() -> list[str]:
    """Read the pins of all oldest versions from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    found = [*project["dependencies"], *(each for extra in EXTRAS for each in extras[extra])]
    return lowest(each for each in found if name_of(each) not in ABSENT)


def make(pins: Sequence[str]) -> Path:
    """Make the environment, unless it is there with these versions; returns its Python."""
    python, stamp = FOLDER / "bin" / "python", FOLDER / "versions"
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    oldest = {name_of(pin) for pin in pins}
    others = [line for line in pinned if line and not line.startswith("#") and name_of(line) not in oldest]
    wanted = "\n".join([sys.version, *pins, *others, ""])
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        venv.create(FOLDER, clear=True, with_pip=True)
        constraints = FOLDER / "constraints.txt"
        constraints.write_text("\n".join([*others, ""]), encoding="utf-8")
        # No oldest version is built from its sources: that takes long, and most do not build on newer Pythons.
        command = [str(python), "-m", "pip", "install", "-q", "--only-binary", ":all:", "-c", str(constraints)]
        if subprocess.run([*command, *pins, *TOOLS], check=False).returncode != 0:
            version = sys.version.split()[0]
            sys.exit(f"oldest: cannot install {', '.join(pins)} for Python {version}; 3.11 and 3.12 have wheels of all")
        stamp.write_text(wanted, encoding="utf-8")
    return python


def link_farandole() -> None:
    """Put this environment's farandole into the oldest one."""
    (target,) = FOLDER.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if re.match(r"_?_?(editable_\w*?)?farandole", entry.name):
            link = target / entry.name
            link.unlink(missing_ok=True)
            link.symlink_to(entry)


def main(arguments: Sequence[str]) -> None:
    """Make the environment, import every test module in it, and become its pytest."""
    pins = promised()
    python = make(pins)
    link_farandole()
    print("oldest:", *pins, flush=True)
    pytest = [str(python), "-m", "pytest", "-p", "no:cacheprovider"]
    # Tests whose package is not installed skip; none fails to import.
    collected = subprocess.run(
        [*pytest, "--collect-only", "-qq"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if collected.returncode != 0:
        sys.exit(collected.stdout + collected.stderr)
    chosen = arguments or [str(path.relative_to(ROOT)) for pattern in TESTS for path in sorted(ROOT.glob(pattern))]
    os.chdir(ROOT)
    os.execv(python, [*pytest, *chosen])


if __name__ == "__main__":
    main(sys.argv[1:])
