"""The reference has every public name of every module that users import."""

import re
from pathlib import Path

import pytest

pytest.importorskip("sphinx")
from public_names import describe, to_rst

import farandole.compat
import farandole.errors
import farandole.numpy

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference" / "api"
DESCRIBED = {
    module
    for page in PAGES.glob("*.rst")
    for module in re.findall(r"^\.\. public-names:: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
}


def test_modules_that_guides_import_are_described() -> None:
    guides = [ROOT / "README.md", *(page for page in ROOT.glob("docs/guide/*.md") if page.stem != "extending")]
    text = "".join(guide.read_text(encoding="utf-8") for guide in guides)
    imported = set(re.findall(r"^ *(?:from|import) (farandole[\w.]*)", text, re.MULTILINE))
    assert imported - DESCRIBED == set()


def test_every_binding_is_described() -> None:
    source = ROOT / "src" / "farandole"
    bindings = {path.parent.name for path in source.glob("*/ops.py")}
    assert {f"farandole.{name}" for name in bindings} <= DESCRIBED


@pytest.mark.parametrize("module", [farandole, farandole.errors, farandole.numpy, farandole.compat])
def test_every_name_is_described(module: object) -> None:
    lines = [*describe(module)]
    described = [line.rpartition(".")[2] for line in lines if re.match(r"\.\. (auto|py:)\w+:: ", line)]
    assert described == sorted(module.__all__)


def test_backticks_of_docstrings_mark_code() -> None:
    assert to_rst(["Return `a*b`s of *args.", "", "|x|"]) == ["Return \\ ``a*b``\\ s of \\*args.", "", "\\|x\\|", ""]
    assert to_rst(["A tree:", "  a"]) == ["::", "", "   A tree:", "     a", ""]
