"""Builder of what a release consists of: release.py [--here | --compilers] [--twice].

Builds into dist/ the sdist, and from it the wheels for CPython 3.11 (cp311) and for 3.12 and newer (cp312-abi3), each
for x86_64 and aarch64, and checks them. Zig's C++ compiler, a package of PyPI, links them to glibc 2.28 and to its own
C++ library (docs/adr/0058-wheels-by-zig.md). Compiler, checkers and build environments lie below build/release; only
the first run downloads anything. The bytes depend on the commit, not on the folder or the time."""

import argparse
import glob
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "release"
TOOLS = WORK / "tools" / "bin"
DIST = ROOT / "dist"
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = "2.28"  # the one of PyTorch's wheels
LARGEST = 3 << 20  # bytes of a wheel


@dataclass(frozen=True, kw_only=True)
class Python:
    """An interpreter that builds one kind of wheel."""

    tag: str  # of the wheels: cp311-cp311 or cp312-abi3
    path: str

    def environment(self) -> Path:
        """Return an environment with what pyproject.toml needs to build."""
        return environment(WORK / f"python-{self.tag}", self.path, project()["build-system"]["requires"])


def project() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return found


def environment(folder: Path, python: str, packages: Sequence[str]) -> Path:
    """Make a virtual environment with `packages`, as pinned in constraints.txt, unless it is there already."""
    stamp = folder / "packages"
    wanted = "\n".join([*packages, (ROOT / "constraints.txt").read_text(encoding="utf-8")])
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, *packages], check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return folder


def interpreters() -> dict[tuple[int, ...], str]:
    """Return the path of each CPython from 3.11 on that this machine has and that makes environments, by version."""
    names = [sys.executable, *(f"python3.{minor}" for minor in range(11, 20))]
    names += glob.glob(str(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions/3.*/bin/python3"))
    show = "import sys, ensurepip; print(*sys.version_info[:2], sys.implementation.name, sys._base_executable)"
    found: dict[tuple[int, ...], str] = {}
    for each in names:
        if (path := shutil.which(each)) is None:
            continue
        shown = subprocess.run([path, "-P", "-c", show], capture_output=True, text=True)
        if shown.returncode == 0 and shown.stdout.split()[2] == "cpython":  # 3.10 and older know no -P
            major, minor, _, base = shown.stdout.split(maxsplit=3)
            found.setdefault((int(major), int(minor)), base.strip())
    return found


def pythons(here: bool) -> list[Python]:
    """Choose CPython 3.11, and the oldest from 3.12 on; exit where one is missing, or with `here` both."""
    found = interpreters()
    newer = min((version for version in found if version >= (3, 12)), default=None)
    chosen = [Python(tag="cp311-cp311", path=found[3, 11])] if (3, 11) in found else []
    chosen += [Python(tag="cp312-abi3", path=found[newer])] if newer else []
    if len(chosen) < (1 if here else 2):
        have = ", ".join(f"{major}.{minor}" for major, minor in sorted(found))
        sys.exit(f"release: needs CPython 3.11 and one from 3.12 on, with venv; this machine has {have or 'none'}")
    return chosen


def date_of_commit() -> str:
    """Return the time of the last commit, in seconds, which archives give to each file."""
    words = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def compiler(architecture: str, work: Path = WORK) -> dict[str, str]:
    """Write commands that run Zig's compiler for `architecture`; return the CMake variables that name them."""
    zig = next((WORK / "tools" / "lib").glob("python3*/site-packages/ziglang")) / "zig"
    commands = {
        "c++": f'"{zig}" c++ -target {architecture}-linux-gnu.{GLIBC} "$@"',
        "ar": f'"{zig}" ar "$@"',
        "ranlib": f'"{zig}" ranlib "$@"',
    }
    folder = WORK / f"zig-{architecture}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in commands.items():
        (folder / name).write_text(f"#!/bin/sh\nexec {command}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return {
        "CMAKE_CXX_COMPILER": str(folder / "c++"),
        "CMAKE_AR": str(folder / "ar"),
        "CMAKE_RANLIB": str(folder / "ranlib"),
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": architecture,
        # Assertions name their file; the folder of the checkout is nobody's business. nanobind's headers use `stderr`,
        # which Zig's C++ library declares only in <cstdio>.
        "CMAKE_CXX_FLAGS": f"-g0 -ffile-prefix-map={WORK}=. -ffile-prefix-map={work}=. -include cstdio",
        "CMAKE_MODULE_LINKER_FLAGS": "-s",
        "FARANDOLE_ZIG": version_of("ziglang"),
    }


def version_of(package: str) -> str:
    show = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([TOOLS / "python", "-c", show], check=True, capture_output=True, text=True).stdout.strip()


def build_wheel(python: Python, architecture: str, work: Path, dist: Path) -> None:
    """Build one wheel from the sdist in work/source. The core is compiled once per architecture, for both Pythons."""
    folder = work / architecture
    (folder / "CMakeCache.txt").unlink(missing_ok=True)  # it refers to the previous Python
    defines = [f"-Ccmake.define.{name}={value}" for name, value in compiler(architecture, work).items()]
    variables = {
        "SOURCE_DATE_EPOCH": date_of_commit(),
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-311-{architecture}-linux-gnu.so",
        "PATH": f"{TOOLS}:{os.environ['PATH']}",  # cmake and ninja
    }
    words = [
        str(python.environment() / "bin" / "python"),
        "-m",
        "pip",
        "wheel",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
    ]
    words += [f"--wheel-dir={dist}", f"-Cbuild-dir={folder}", *defines]
    # In scikit-build-core's table of variables it names the wheel's platform, and Python's own modules do not see it.
    words += [f"-Cenv._PYTHON_HOST_PLATFORM=manylinux_{GLIBC.replace('.', '_')}_{architecture}", str(work / "source")]
    subprocess.run(words, check=True, env=without_cxx() | variables)


def without_cxx() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "CXXFLAGS", "LDFLAGS")}


def build_sdist(python: Python, work: Path, dist: Path) -> None:
    """Build the sdist, which leaves out what Git ignores, and unpack it into work/source."""
    words = [str(TOOLS / "python"), "-m", "build", "--sdist", "--no-isolation", f"--outdir={dist}", str(ROOT)]
    variables = {"SOURCE_DATE_EPOCH": date_of_commit(), "PYTHONPATH": packages_of(python.environment())}
    subprocess.run(words, check=True, env=without_cxx() | variables, stdout=subprocess.DEVNULL)
    (archive,) = dist.glob("*.tar.gz")
    (work / "source").mkdir(parents=True)
    unpack = ["tar", "--extract", "--strip-components=1", f"--file={archive}", f"--directory={work / 'source'}"]
    subprocess.run(unpack, check=True)


def packages_of(folder: Path) -> str:
    return str(next((folder / "lib").glob("python3*/site-packages")))


def build(options: argparse.Namespace, work: Path, dist: Path) -> None:
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    shutil.rmtree(work / "source", ignore_errors=True)
    found = pythons(options.here)
    build_sdist(found[0], work, dist)
    for architecture in (platform.machine(),) if options.here else ARCHITECTURES:
        # Files of the sdist are as old as the commit: older than objects of an earlier one, which a build would keep.
        shutil.rmtree(work / architecture, ignore_errors=True)
        for python in found:
            print(f"release: {python.tag} for {architecture}", flush=True)
            build_wheel(python, architecture, work, dist)


def check(dist: Path) -> None:
    """Run the checkers; raise `CalledProcessError` or `SystemExit` if one objects."""
    wheels = sorted(dist.glob("*.whl"))
    for wheel in wheels:
        if wheel.stat().st_size > LARGEST:
            sys.exit(f"release: {wheel.name} has {wheel.stat().st_size} bytes, {LARGEST} are the most")
        shown = subprocess.run([TOOLS / "auditwheel", "show", wheel], check=True, capture_output=True, text=True).stdout
        needs = re.search(r'following platform\s+tag:\s+"manylinux_2_(\d+)_', shown)
        if needs is None or int(needs[1]) > int(GLIBC.partition(".")[2]):
            sys.exit(f"release: {wheel.name} is not what its name says:\n{shown}")
        print(f"auditwheel: {wheel.name} runs with glibc 2.{needs[1]}", flush=True)
    extensions = [str(each) for each in wheels if "abi3" in each.name]
    commands: list[tuple[str, ...]] = [("abi3audit", "--strict", "--summary", *extensions)]
    commands += [("check-wheel-contents", *map(str, wheels))]
    commands += [("twine", "check", "--strict", *map(str, sorted(dist.iterdir())))]
    for name, *words in commands:
        subprocess.run([TOOLS / name, *words], check=True)


def hashes(dist: Path) -> Mapping[str, str]:
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in sorted(dist.iterdir())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", action="store_true", help="only the wheels for this machine's architecture")
    parser.add_argument("--compilers", action="store_true", help="only install Zig, as build/release/zig-*/c++")
    parser.add_argument("--twice", action="store_true", help="build all twice, and compare the bytes")
    options = parser.parse_args()
    environment(WORK / "tools", sys.executable, project()["dependency-groups"]["release"])
    if options.compilers:
        for architecture in ARCHITECTURES:
            compiler(architecture)
        return
    build(options, WORK, DIST)
    check(DIST)
    made = hashes(DIST)
    for name, digest in made.items():
        print(f"{digest}  {name}")
    if options.twice:
        shutil.rmtree(WORK / "again", ignore_errors=True)
        build(options, WORK / "again", WORK / "again" / "dist")
        if (again := hashes(WORK / "again" / "dist")) != made:
            sys.exit(f"release: a second build differs: {sorted(set(made.items()) ^ set(again.items()))}")
        print("release: a second build has the same bytes")


if __name__ == "__main__":
    main()
