"""Tests with the oldest dependencies that pyproject.toml allows: oldest.py [NAME | NAME==VERSION]... [-- ARGUMENTS].

Each environment of `ENVIRONMENTS` is a virtual environment below build/. It contains the farandole of .venv and the
lowest versions that `dependencies` and its extras allow, and is made again if a version changes. NAMEs choose
environments; without names all run but spark and mxnet. ==VERSION sets the version of the framework of that name, as in
tensorflow==2.19.1. ARGUMENTS for pytest replace the environment's own tests."""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
OTHERS = ("-k", "not numpy")  # the conformance suite without the binding that `libraries` tests


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Extras to install in their lowest versions, and the tests to run with them."""

    extras: tuple[str, ...]
    tests: tuple[str, ...]
    absent: tuple[str, ...] = ()  # packages of the extras that are left out
    # Dependencies for which pip chooses the version, because constraints.txt pins one that the old packages refuse.
    loose: tuple[str, ...] = ()
    build: tuple[str, ...] = ()  # packages without wheels, built from source
    arguments: tuple[str, ...] = ()
    by_name: bool = False  # left out unless it is named


ENVIRONMENTS = {
    "libraries": Environment(
        extras=("autotune", "data", "prometheus", "spark", "tensorboard"),
        absent=("pyspark",),
        tests=(
            "tests/unit/compat/test_util.py",
            "tests/unit/core",
            "tests/unit/data",
            "tests/unit/test_imports.py",
            "tests/unit/launch/test_pickling.py",
            "tests/unit/test_surface.py",
            "tests/conformance/test_movement.py",
            "tests/conformance/test_objects.py",
            "tests/conformance/test_reductions.py",
            "tests/conformance/test_shared.py",
            "tests/ranks/test_data_*.py",
            "tests/ranks/test_metrics.py",
            "tests/ranks/test_tuning.py",
        ),
    ),
    "jax": Environment(
        extras=("data", "jax", "keras"),
        loose=("jaxlib", "ml-dtypes", "scipy"),
        tests=(
            "tests/conformance",
            "tests/ranks/test_jax.py",
            "tests/ranks/test_jax_programs.py",
            "tests/ranks/test_keras.py",
            "tests/unit/jax",
        ),
        arguments=OTHERS,
    ),
    "tensorflow": Environment(
        extras=("data", "keras", "tensorflow"),
        loose=("ml-dtypes", "protobuf", "tensorboard", "tensorflow-cpu"),
        tests=(
            "tests/ranks/test_compat_tensorflow.py",
            "tests/ranks/test_keras.py",
            "tests/ranks/test_tensorflow_*.py",
            "tests/unit/tensorflow",
        ),
    ),
    "torch": Environment(
        extras=("data", "torch"),
        tests=(
            "tests/conformance",
            "tests/ranks/test_torch_*.py",
            "tests/system/test_torch_distributed.py",
            "tests/unit/torch",
        ),
        arguments=("-k", "not numpy and not example"),  # the examples need more packages
    ),
    "mxnet": Environment(
        extras=("data", "mxnet"),
        tests=(
            "tests/conformance",
            "tests/ranks/test_mxnet.py",
            "tests/system/programs/test_docs.py",
            "tests/system/programs/test_mxnet_examples.py",
        ),
        arguments=("-k", "mxnet"),
        by_name=True,  # `make test-mxnet` names it: constraints.txt has a NumPy that MXNet refuses
    ),
    "spark": Environment(
        extras=("spark",),
        build=("pyspark",),
        tests=("tests/unit/spark", "tests/unit/estimators", "tests/system/test_spark_local.py"),
        # PySpark 4.0 leaves sockets of finished jobs to the garbage collector.
        arguments=("-W", "ignore::ResourceWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"),
        by_name=True,  # 400 MB; each session takes ten seconds
    ),
}


class Unavailable(Exception):
    """No index offers a package in the requested version."""


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
    """Return the normalized package name of a requirement."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>!~;\[ ]", requirement, maxsplit=1)[0]).lower()


def promised(environment: Environment) -> list[str]:
    """Return pins of the oldest versions that pyproject.toml allows in an environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    found = [*project["dependencies"], *(each for extra in environment.extras for each in extras[extra])]
    return lowest(each for each in found if name_of(each) not in environment.absent)


def choose(words: Sequence[str]) -> dict[str, tuple[Environment, list[str]]]:
    """Return the environments that `words` name, with their pins, by folder name."""
    chosen = {}
    for word in words or [name for name, environment in ENVIRONMENTS.items() if not environment.by_name]:
        name, _, version = word.partition("==")
        if name not in ENVIRONMENTS:
            sys.exit(f"oldest: {name} is unknown; choose from {', '.join(ENVIRONMENTS)}")
        pins = promised(ENVIRONMENTS[name])
        if version:
            if not any(name_of(pin) == name for pin in pins):
                sys.exit(f"oldest: {name} has no version of its own")
            pins = [word if name_of(pin) == name else pin for pin in pins]
        chosen[word.replace("==", "-")] = ENVIRONMENTS[name], pins
    return chosen


def make(folder: Path, environment: Environment, pins: Sequence[str]) -> Path:
    """Make the environment unless it exists with these versions; return the path of its Python.

    Raises `Unavailable` if no index offers PyTorch's CPU build."""
    python, stamp = folder / "bin" / "python", folder / "versions"
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    free = {*(name_of(pin) for pin in pins), *environment.loose}
    others = [line for line in pinned if line and not line.startswith("#") and name_of(line) not in free]
    wanted = "\n".join([sys.version, *pins, *others, ""])
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        venv.create(folder, clear=True, with_pip=True)
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join([*others, ""]), encoding="utf-8")
        # Only wheels: building an old version takes long, and most do not build with newer Pythons.
        install = [str(python), "-m", "pip", "install", "-q", "--only-binary", ":all:", "-c", str(constraints)]
        packages, options = builds(pins, install)
        if environment.build:
            subprocess.run([*install, "setuptools", "wheel"], check=True)
            options += ["--no-binary", ",".join(environment.build), "--no-build-isolation"]
        if subprocess.run([*install, *options, *packages, *TOOLS], check=False).returncode != 0:
            version = sys.version.split()[0]
            sys.exit(f"oldest: cannot install {', '.join(pins)} for Python {version}; 3.11 and 3.12 have wheels of all")
        stamp.write_text(wanted, encoding="utf-8")
    return python


def builds(pins: Sequence[str], install: Sequence[str]) -> tuple[list[str], list[str]]:
    """Choose the CPU builds of frameworks; return the packages and pip's options for them. Raises `Unavailable`."""
    packages = [
        re.sub(r"^tensorflow==", "tensorflow-cpu==", pin) if os.uname().machine == "x86_64" else pin for pin in pins
    ]
    for place, pin in enumerate(packages):
        if name_of(pin) != "torch":
            continue
        # PyPI's build comes with gigabytes of CUDA. pip's configured index may offer a CPU build; PyTorch's index does.
        setup = (ROOT / "tools" / "setup.sh").read_text(encoding="utf-8")
        (index,) = re.findall(r"^readonly CPU_INDEX=(\S+)$", setup, re.MULTILINE)
        packages[place] = f"{pin}+cpu"
        for options in ([], ["--extra-index-url", index]):
            look = [*install, *options, "--retries", "1", "--dry-run", "--no-deps", packages[place]]
            if subprocess.run(look, capture_output=True, check=False).returncode == 0:
                return packages, options
        raise Unavailable(
            f"neither pip's index nor {index} offers {packages[place]} to Python {sys.version.split()[0]}"
        )
    return packages, []


def link_farandole(folder: Path) -> None:
    """Link the farandole of the current environment into the one in `folder`."""
    (target,) = folder.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if re.match(r"_?_?(editable_\w*?)?farandole", entry.name):
            link = target / entry.name
            link.unlink(missing_ok=True)
            link.symlink_to(entry)


def test(python: Path, environment: Environment, arguments: Sequence[str]) -> bool:
    """Run the tests of an environment, and import all test modules there meanwhile; return whether all is well."""
    paths = [str(path.relative_to(ROOT)) for pattern in environment.tests for path in sorted(ROOT.glob(pattern))]
    chosen = arguments or [*paths, *environment.arguments]
    jobs = "3"  # more than two cores, as tests wait for a third of their time
    variables = os.environ | {"INTERPRETER": str(python)}
    # A test module whose package is not installed must skip, not fail to import.
    collect = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-qq"]
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(collect, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as collecting:
            passed = subprocess.run(["tools/tests.sh", jobs, *chosen], cwd=ROOT, env=variables).returncode == 0
        if collecting.returncode != 0:
            output.seek(0)
            print(output.read(), file=sys.stderr)
        return passed and collecting.returncode == 0


def main(words: Sequence[str]) -> None:
    """Make the chosen environments and run their tests; exit with a message if one fails."""
    cut = words.index("--") if "--" in words else len(words)
    asked, arguments, failed = words[:cut], words[cut + 1 :], []
    for name, (environment, pins) in choose(asked).items():
        folder = ROOT / "build" / f"oldest-{name}"
        print(f"oldest: {name}:", *pins, flush=True)
        try:
            python = make(folder, environment, pins)
        except Unavailable as problem:
            print(f"oldest: {name} is left out: {problem}", file=sys.stderr, flush=True)
            if asked:
                failed.append(name)
            continue
        link_farandole(folder)
        if not test(python, environment, arguments):
            failed.append(name)
    if failed:
        sys.exit(f"oldest: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
