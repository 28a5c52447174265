"""Bindings whose adapter suffices have all operations of `Operations`."""

from pathlib import Path

import pytest
from binding_operations import ABSENT, FILES, render


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_a_binding_has_all_operations(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert render(text, ABSENT.get(file.parent.name, ())) == text, "run python tools/binding_operations.py"


def test_a_function_of_the_binding_is_left_alone() -> None:
    made = render("def allreduce(tensor): ...\n\n\n")
    assert "\nallreduce = " not in made and "\nallreduce_ = _operations.allreduce_\n" in made and '"allreduce",' in made
