"""Checks of the Markdown pages: paths and names in backticks exist, and lines of code fit on a page of the site.

The tool prints each breach and exits with 1 if there is one."""

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

WIDEST_CODE = 88  # characters; docs/_static/pages.css makes the text so wide, also in a window of 1,280 pixels
PACKAGE = Path("src/farandole")
ROOTS = ("bench", "deploy", "docs", "examples", "native", "src", "tests", "tools")
# On these pages every path is one of the repository; guides also name files of the reader's.
FOR_CONTRIBUTORS = ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "docs/adr/", "docs/guide/extending.md")
_FENCE = re.compile(r"^ *```")
_CODE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"[\w.<>*-]*(/[\w.<>*-]+)*(/|\.(py|pyi|cc|h|sh|md|toml|txt|css))")
_NAME = re.compile(r"farandole(\.\w+)+")
# Not in the repository: results, a user's script, a property of Spark.
ABSENT = ("bench/results/", "discover_hosts.sh", "farandole.spark.converter.parentCacheDirUrl")


def too_wide(page: Path, text: str) -> Iterator[str]:
    """Yield the lines of code that would scroll sideways."""
    within = False
    for number, line in enumerate(text.splitlines(), 1):
        if _FENCE.match(line):
            within = not within
        elif within and len(line) > WIDEST_CODE:
            yield f"{page}:{number}: {len(line)} characters of code, {WIDEST_CODE} are the most; break the line"


def missing_names(page: Path, text: str) -> Iterator[str]:
    """Yield the paths, and the names of modules and what is in them, that do not exist."""
    own = str(page).startswith(FOR_CONTRIBUTORS)
    for word in re.findall(r"`([^`\n]+)`", _CODE.sub("", text)):
        if word.startswith(ABSENT):
            continue
        if _NAME.fullmatch(word) and not word.endswith(".py"):
            if not _is_name(word):
                yield f"{page}: there is no `{word}`"
        elif _PATH.fullmatch(word) and (own or word.split("/")[0] in ROOTS) and not _is_path(word):
            yield f"{page}: there is no `{word}`"


@cache
def _files() -> tuple[str, ...]:
    files = [path for root in ROOTS for path in Path(root).rglob("*") if path.is_file()]
    return tuple(f"/{path}" for path in [*files, *Path().glob("*.*")])


@cache
def _is_path(word: str) -> bool:
    """Return whether a file's path ends in `word`, or has the folder `word`; "<name>" and "*" stand for any name."""
    escaped = re.sub(r"<\w+>|\\\*", "[^/]+", re.escape(word))
    pattern = re.compile(f"/{escaped}" + ("" if word.endswith("/") else "$"))
    return any(pattern.search(path) for path in _files())


@cache
def _is_name(word: str) -> bool:
    """Return whether a module of farandole has this name, or all that follows the module's name is in its text."""
    place, parts = Path("src"), word.split(".")
    while parts and ((place / parts[0]).is_dir() or (place / f"{parts[0]}.py").is_file()):
        place /= parts.pop(0)
    file = place.with_suffix(".py")
    # A package's names may come from its modules, a binding's also from those that all bindings share.
    files = [file] if file.is_file() else [*place.glob("*.py"), PACKAGE / "core" / "public.py"]
    texts = [path.read_text(encoding="utf-8") for path in files]
    return all(any(re.search(rf"\b{part}\b", text) for text in texts) for part in parts)


def main() -> int:
    """Check all pages; return 1 if there is a breach."""
    found: list[str] = []
    for page in sorted([*Path().glob("*.md"), *Path("docs").rglob("*.md")]):
        text = page.read_text(encoding="utf-8")
        found += too_wide(page, text) if page.name == "README.md" or page.parts[0] == "docs" else []
        if page.name != "CHANGELOG.md":  # tells what was, too
            found += missing_names(page, text)
    for each in found:
        print(each, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
