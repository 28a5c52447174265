"""The release: notes of a version, and a workflow that calls only targets that exist."""

import re
from pathlib import Path

import pytest
from changelog import notes

ROOT = Path(__file__).parents[2]
PACKAGE = '__version__ = "1.2.0"\n'
CHANGELOG = (
    "# Changelog\n\n## Unreleased\n\n* New\n\n## 1.2.0 (2026-12-01)\n\n* Text\n\n## 1.1.0 (2026-01-01)\n\n* Old\n"
)


def test_notes_are_the_section_of_the_tag() -> None:
    assert notes("v1.2.0", PACKAGE, CHANGELOG) == "* Text"


@pytest.mark.parametrize(
    ("tag", "package", "changelog", "words"),
    [
        ("v1.3.0", PACKAGE, CHANGELOG, "version is 1.2.0"),
        ("1.2.0", PACKAGE, CHANGELOG, "the tag is 1.2.0"),
        ("v1.2.0", PACKAGE, CHANGELOG.replace("2026-12-01", "soon"), r"no section '## 1.2.0 \(YYYY"),
        ("v1.2.0", PACKAGE, CHANGELOG.replace("1.2.0", "1.2.1"), "newest is 1.2.1"),
        ("v1.2.0", PACKAGE, CHANGELOG.replace("* Text\n", ""), "is empty"),
        ("v1.2.0", PACKAGE, "# Changelog\n", "newest is none"),
    ],
)
def test_what_does_not_agree_is_refused(tag: str, package: str, changelog: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        notes(tag, package, changelog)


def test_the_workflow_calls_targets_of_the_makefile() -> None:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
    called = [target for step in steps for target in re.findall(r"\bmake (?:-s )?([a-z-]+)", step)]
    assert set(called) <= set(targets)
    assert {"release", "release-notes", "test-matrix", "docs"} <= set(called)
    # Nothing else runs but our targets and the forge's own command.
    assert all(re.search(r"\bmake\b|\.ci/run", step) for step in steps)
    assert all(set(job.get("needs", [])) <= set(jobs) or job["needs"] in jobs for job in jobs.values())


def test_documents_name_targets_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"^make ([a-z-]+) ", contributing, re.MULTILINE)
    assert named and set(named) <= set(targets)
