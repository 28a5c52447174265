"""Notes of one version: changelog.py TAG prints what CHANGELOG.md says of the version, for the page of the release.

Exits with an error unless the tag is "v" and the version of src/farandole/__init__.py, and the changelog has a section
`## VERSION (YYYY-MM-DD)` for it with text, above those of older versions."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(tag: str, package: str, changelog: str) -> str:
    """Return the section of `tag`; raise `ValueError` if tag, package and changelog do not agree."""
    found = re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    if found is None or tag != f"v{found[1]}":
        raise ValueError(f"the tag is {tag}, the package's version is {found[1] if found else 'unknown'}")
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    titles = [each.partition("\n")[0].strip() for each in sections]
    versions = [title for title in titles if title != "Unreleased"]
    if not versions or not re.fullmatch(re.escape(found[1]) + r" \(\d{4}-\d\d-\d\d\)", versions[0]):
        first = versions[0] if versions else "none"
        raise ValueError(f"CHANGELOG.md has no section '## {found[1]} (YYYY-MM-DD)' for {tag}; the newest is {first}")
    if not (text := sections[titles.index(versions[0])].partition("\n")[2].strip()):
        raise ValueError(f"the section of {found[1]} in CHANGELOG.md is empty")
    return text


def main() -> None:
    package = (ROOT / "src/farandole/__init__.py").read_text(encoding="utf-8")
    try:
        print(notes(sys.argv[1], package, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))
    except ValueError as error:
        sys.exit(f"changelog: {error}")


if __name__ == "__main__":
    main()
