"""The pages name files and modules that exist, and their code fits; the check finds those that do not."""

from pathlib import Path

import documents
import pytest

from farandole import errors

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_all_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert documents.main() == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "word",
    [
        "farandole.torch.rank",  # of all bindings
        "farandole.errors.PeerLost",
        "farandole.spark.driver.log",
        "native/engine/joined.cc",
        "tests/system/test_launch_*.py",
        "src/farandole/<framework>/adapter.py",
        "docs/adr/",
    ],
)
def test_names_that_exist(word: str) -> None:
    assert not [*documents.missing_names(Path("docs/guide/extending.md"), f"See `{word}`.")]


@pytest.mark.parametrize(
    "word", ["farandole.bootstrap.hosted", "farandole.torch.no_such_name", "native/engine/no.cc", "src/farandole/no/"]
)
@pytest.mark.parametrize("page", ["docs/guide/data.md", "ARCHITECTURE.md"])
def test_names_that_do_not_exist(word: str, page: str) -> None:
    assert [*documents.missing_names(Path(page), f"See `{word}`.")] == [f"{page}: there is no `{word}`"]


def test_guides_name_files_of_the_reader() -> None:
    assert not [*documents.missing_names(Path("docs/guide/data.md"), "Save it as `train.py` in `train/cats/`.")]


def test_width_of_code() -> None:
    wide = "x" * 89
    text = f"{wide}\n\n```python\n{wide[1:]}\n{wide}\n```\n{wide}\n"
    (found,) = documents.too_wide(Path("page.md"), text)
    assert found.startswith("page.md:5: 89 characters")


def test_every_class_of_errors_is_on_its_page() -> None:
    page = (ROOT / "docs" / "guide" / "errors.md").read_text(encoding="utf-8")
    classes = [name for name in errors.__all__ if isinstance(getattr(errors, name), type)]
    assert [name for name in classes if f"`{name}`" not in page] == []
