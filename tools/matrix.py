"""Install matrix: the wheel of dist/ beside many versions of Python and of frameworks: matrix.py [ROW...].

Each row is an environment of its own, made from wheels alone, whose PATH has no compiler; the programs of
tests/data/smoke.py run in it as two ranks. The environment is deleted afterwards. Without names all rows run, and the
outcome is written to docs/reference/versions.md. A row is left out, with the reason, if this machine lacks its Python
or no index has its packages.

    TORCH=cuda   also rows of PyTorch whose CPU build no index offers, with the build that brings gigabytes of CUDA"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from release import ROOT, TOOLS, WORK, environment, interpreters, project

PAGE = ROOT / "docs" / "reference" / "versions.md"
RULE = "|---|---|---|---|"  # of its table; rows follow
FOLDER = ROOT / "build" / "matrix"
SMOKE = ROOT / "tests" / "data" / "smoke.py"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
COMPILERS = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|ld|as|cmake|ninja|make|python[\d.]*)(-[\d.]+)?")
ALONE = ("pandas", "spark")  # programs that are no ranks
DEADLINE = 600  # seconds, for one program


@dataclass(frozen=True)
class Row:
    """One environment: Python's version, packages besides farandole's wheel, and programs of smoke.py."""

    python: str
    packages: tuple[str, ...]
    programs: tuple[str, ...]


def row(python: str, packages: str, programs: str) -> Row:
    return Row(python, tuple(packages.split()), tuple(programs.split()))


TF_OLDEST = "tensorflow-cpu~=2.16.1 keras~=3.10.0 tf_keras~=2.16.0"
ROWS = {
    "numpy-1": row("3.11", "numpy~=1.26.0 pandas~=2.2.0 pyarrow~=16.0 fsspec", "numpy pandas"),
    "numpy-2": row("3.12", "numpy>=2 pandas>=3 pyarrow fsspec", "numpy pandas"),
    "numpy-2-3.13": row("3.13", "numpy>=2 pandas~=2.3.0 pyarrow fsspec", "numpy pandas"),
    "numpy-2-3.14": row("3.14", "numpy>=2 pandas>=3 pyarrow fsspec", "numpy pandas"),
    "jax-oldest": row("3.11", "jax==0.5.1 jaxlib==0.5.1", "jax"),
    "jax-newest": row("3.13", "jax", "jax"),
    "tensorflow-oldest": row("3.11", TF_OLDEST, "tensorflow keras tf_keras"),
    "tensorflow-2.18": row("3.12", "tensorflow-cpu~=2.18.0 keras tf_keras~=2.18.0", "tensorflow keras tf_keras"),
    "tensorflow-newest": row("3.13", "tensorflow-cpu keras tf_keras", "tensorflow keras tf_keras"),
    "torch-oldest": row("3.12", "torch==2.10.0+cpu lightning~=2.4.0", "torch lightning"),
    "torch-2.13": row("3.11", "torch==2.13.0+cpu lightning", "torch lightning"),
    "torch-2.14": row("3.13", "torch==2.14.1+cpu lightning", "torch lightning"),
    "torch-2.15": row("3.13", "torch==2.15.0+cpu lightning", "torch lightning"),
    "spark-3.5": row("3.11", "pyspark~=3.5.0 pandas~=2.2.0 numpy~=1.26.0 pyarrow~=16.0 fsspec", "spark"),
    "spark-4.0": row("3.12", "pyspark~=4.0.0 pandas~=2.2.0 pyarrow fsspec", "spark"),
    "spark-4.3": row("3.13", "pyspark~=4.3.0 pandas~=2.3.0 pyarrow fsspec", "spark"),
}


class Missing(Exception):
    """What a row needs is not to be had."""


def commands_without_compilers() -> Path:
    """Return a folder with links to the commands of this machine that compile nothing, Java's among them."""
    folder = FOLDER / "bin"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for place in os.get_exec_path():
        for each in Path(place).glob("*") if place.startswith(("/bin", "/usr/bin", "/usr/local/bin")) else ():
            if not COMPILERS.fullmatch(each.name) and not (folder / each.name).is_symlink():
                (folder / each.name).symlink_to(each)
    return folder


def install(name: str, wanted: Row, commands: Path) -> Path:
    """Make the environment, without a compiler, and return its folder. Raises `Missing`."""
    found = interpreters()
    version = tuple(map(int, wanted.python.split(".")))
    if version not in found:
        raise Missing(f"no CPython {wanted.python} on the machine")
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([TOOLS / "uv", "venv", "-q", "--python", found[version], folder], check=True)
    words = [str(TOOLS / "uv"), "pip", "install", "-q", "--python", str(folder / "bin" / "python")]
    subprocess.run(
        [*words, "--refresh", "--no-index", "--no-deps", f"--find-links={ROOT / 'dist'}", "farandole"], check=True
    )
    words += [f"--find-links={each}" for each in os.environ.get("PIP_FIND_LINKS", "").split()]
    # "+cpu" names builds that PyTorch's index has; a folder of PIP_FIND_LINKS may have them, too.
    cuda = os.environ.get("TORCH") == "cuda"
    words += ["farandole", *(each.replace("+cpu", "" if cuda else "+cpu") for each in wanted.packages)]
    attempts = [words]
    if any("+cpu" in each for each in words):
        attempts.append([*words, "--index", CPU_INDEX, "--index-strategy", "unsafe-best-match"])
    variables = {**os.environ, "PATH": str(commands)}
    for attempt in attempts:
        made = subprocess.run(attempt, capture_output=True, text=True, env=variables)
        if made.returncode == 0:
            return folder
    raise Missing(f"uv: {' '.join(made.stderr.split())[-200:]}")


def run(folder: Path, wanted: Row, commands: Path) -> str:
    """Run the row's programs; return "" or what failed."""
    variables = {name: os.environ[name] for name in ("HOME", "JAVA_HOME", "LANG") if name in os.environ}
    variables |= {"PATH": f"{folder / 'bin'}:{commands}", "KERAS_BACKEND": "tensorflow"}
    for each in wanted.programs:
        start = [] if each in ALONE else ["farandole", "run", "-np", "2"]
        words = [*start, "python", "-P", str(SMOKE), each]
        more = {"TF_USE_LEGACY_KERAS": "1"} if each == "tf_keras" else {}
        try:
            done = subprocess.run(
                words, cwd=folder, env=variables | more, timeout=DEADLINE, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return f"{each}: no end within {DEADLINE} s"
        if done.returncode != 0:
            print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
            return f"{each} fails"
    return ""


def versions(folder: Path, wanted: Row) -> str:
    """Return the installed versions of the row's packages, and of NumPy."""
    names = [re.split(r"[=~<>]", each)[0] for each in wanted.packages]
    freeze = [str(TOOLS / "uv"), "pip", "list", "--format", "json", "-q", "--python", str(folder / "bin" / "python")]
    shown = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout
    found = {each["name"].replace("-", "_"): each["version"] for each in json.loads(shown)}
    return ", ".join(f"{each} {found[each.replace('-', '_')]}" for each in dict.fromkeys([*names, "numpy"]))


def main() -> None:
    chosen = sys.argv[1:] or [*ROWS]
    if unknown := set(chosen) - set(ROWS):
        sys.exit(f"matrix: there is no row {', '.join(sorted(unknown))}; choose from {', '.join(ROWS)}")
    if not [*(ROOT / "dist").glob("*.whl")]:
        sys.exit("matrix: dist/ has no wheel: run make wheel")
    environment(WORK / "tools", sys.executable, project()["dependency-groups"]["release"])
    commands = commands_without_compilers()
    lines, failed = [], []
    for name in chosen:
        wanted, shown = ROWS[name], ", ".join(ROWS[name].packages)
        try:
            folder = install(name, wanted, commands)
        except Missing as missing:
            outcome = f"left out: {missing}"
        else:
            shown, outcome = versions(folder, wanted), run(folder, wanted, commands) or "works"
            if outcome != "works":
                failed.append(name)
            shutil.rmtree(folder)
        print(f"matrix: {name}: Python {wanted.python}, {shown}: {outcome}", flush=True)
        lines.append(f"| {wanted.python} | {shown} | {', '.join(wanted.programs)} | {outcome} |")
    if not sys.argv[1:]:
        head = PAGE.read_text(encoding="utf-8").partition(RULE)[0]
        PAGE.write_text("\n".join([head + RULE, *lines, ""]), encoding="utf-8")
    if failed:
        sys.exit(f"matrix: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
