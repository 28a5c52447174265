"""The recipes of docs/guide/extending.md: their files and symbols exist, and those with code work in a copy."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import farandole

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "extending.md"
RECIPES = {
    section.partition("\n")[0]: section
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
}
# A block of code of a recipe, indented like its step, whose first line names the file: the whole file, or a change.
BLOCK = re.compile(r"^ *```(?P<kind>py|diff)\n *(?:#|\+\+\+) (?P<path>\S+)\n(?P<code>.*?)^ *```$", re.M | re.S)
STARTS = ("src/", "native/", "tests/", "docs/", "tools/", "launch/")
# The tree under test; none of the environment's import hooks may lead to the installed package.
PYTEST = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "Redirecting" not in type(each).__name__]
sys.path[:0] = ["src", "tests"]
import pytest
options = ["-q", "-c", "pytest.ini", "--rootdir=.", "--import-mode=importlib", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*options, *sys.argv[1:]]))
"""


def words_of(recipe: str) -> list[str]:
    """Return what stands in backticks in the text of a recipe, not in its code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```$", "", RECIPES[recipe], flags=re.M | re.S))


def found_files(word: str) -> list[Path]:
    """Return the files that `word` names, or those of the folder; `<name>` stands for any name."""
    pattern = re.sub(r"<\w+>", "*", word.rstrip("/"))
    places = [*ROOT.glob(pattern), *(ROOT / "src/farandole").glob(pattern)]
    return [file for place in places for file in ([place] if place.is_file() else place.rglob("*.*"))]


def is_path(word: str) -> bool:
    return word.startswith(STARTS) or word in ("pyproject.toml", "constraints.txt")


def code_blocks(recipe: str) -> list[tuple[str, str, list[str]]]:
    """Return kind, path and lines of each block of code, without the indentation of its step."""
    return [
        (match["kind"], match["path"], [line[3:] for line in match["code"].splitlines()])
        for match in BLOCK.finditer(RECIPES[recipe])
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_files_and_symbols_of_a_recipe_exist(recipe: str) -> None:
    words = words_of(recipe)
    paths = [word for word in words if is_path(word)]
    missing = [word for word in paths if not found_files(word)]
    assert not missing, f"{recipe}: there is no {missing}"
    texts = [file.read_text(encoding="utf-8") for word in paths for file in found_files(word) if file.suffix != ".pyc"]
    names = [word for word in words if re.fullmatch(r"[A-Za-z_][\w.]*\w", word) and not is_path(word)]
    names = [name for name in names if not name.endswith((".py", ".cc", ".h"))]
    unknown = [
        name for name in names if not any(re.search(rf"\b{re.escape(name.split('.')[-1])}\b", text) for text in texts)
    ]
    assert not unknown, f"{recipe}: none of its files has {unknown}"


# Files that use the collective of the next test, and would not change for another one.
USERS = {"src/farandole/torch/distributed/group.py"}


def code_of(file: Path) -> str:
    """Return the text of a file without comments and docstrings."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return re.sub(r'""".*?"""|#[^\n]*', "", text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def test_the_recipe_of_a_collective_names_every_file_that_has_one() -> None:
    recipe = "Add a collective"
    named = {file for word in words_of(recipe) if is_path(word) for file in found_files(word)}
    folders = [
        "native",
        *(f"src/farandole/{name}" for name in ("core", "jax", "mxnet", "numpy", "tensorflow", "timeline", "torch")),
    ]
    sources = [file for folder in folders for kind in ("cc", "h", "py") for file in (ROOT / folder).rglob(f"*.{kind}")]
    having = {
        file for file in [*sources, ROOT / "src/farandole/config.py"] if re.search("alltoall", code_of(file), re.I)
    }
    unnamed = {str(file.relative_to(ROOT)) for file in having - named}
    assert unnamed == USERS


def test_a_new_collective_touches_few_files() -> None:
    always = RECIPES["Add a collective"].partition("These are only for some collectives")[0]
    steps = always.partition("\n1. ")[2].partition("\n6. Tests")[0]
    words = set(re.findall(r"`((?:native|src)/[^`\n]+)`", steps))
    generated = {"src/farandole/<binding>/ops.py"}
    only_if = {"native/engine/request.h", "native/engine/wire.cc", "native/collectives/world.h"}
    native = {word for word in words if word.startswith("native")} - only_if
    assert len(native) + 1 <= 12  # and the header
    assert len({word for word in words if word.startswith("src")} - generated) <= 8


@pytest.mark.native
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if code_blocks(recipe)])
def test_recipe_works(recipe: str, tmp_path: Path) -> None:
    if "/data/" in RECIPES[recipe]:
        pytest.importorskip("pyarrow")
    package = tmp_path / "src" / "farandole"
    for folder in reversed(farandole.__path__):  # an editable installation has the extension in a folder of its own
        shutil.copytree(folder, package, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "helpers", tmp_path / "tests" / "helpers")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    tests = []
    for kind, path, lines in code_blocks(recipe):
        file = tmp_path / path
        if kind == "diff":
            before, after = ("\n".join(line[1:] for line in lines if line[:1] != sign) for sign in "+-")
            text = file.read_text(encoding="utf-8")
            assert text.count(before) == 1, f"{path} has these lines {text.count(before)} times:\n{before}"
            file.write_text(text.replace(before, after), encoding="utf-8")
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
            tests += [path] if path.startswith("tests/") else []
    assert tests, "a recipe with code ends with a test of it"
    done = subprocess.run(
        [sys.executable, "-P", "-c", PYTEST, *tests],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-4000:]
