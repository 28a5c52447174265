"""The reader of Dockerfiles, and what it finds in ours."""

from pathlib import Path

import pytest
from dockerfile import read

OURS = Path(__file__).parents[2] / "deploy" / "image" / "Dockerfile"
EXAMPLE = """\
# A comment.
ARG VERSION=1
FROM base:${VERSION}-slim AS one
ARG NAME=a
RUN --mount=from=x,source=/w,target=/w \\
    first "$NAME" \\
 && second
FROM other
COPY --chmod=755 a b /c/
CMD ["d", "-e"]
"""


def test_stages_and_instructions(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(EXAMPLE)
    one, last = read(path, {"VERSION": "2"})
    assert (one.base, one.name, one.arguments) == ("base:2-slim", "one", {"NAME": "a"})
    (run,) = one.instructions
    assert (run.option("mount"), run.line) == ("from=x,source=/w,target=/w", 5)
    assert run.rest == 'first "$NAME" && second'
    assert [(each.name, each.words()) for each in last.instructions] == [
        ("COPY", ["a", "b", "/c/"]),
        ("CMD", ["d", "-e"]),
    ]
    assert read(path, {"NAME": "b"})[0].arguments == {"NAME": "b"}
    with pytest.raises(ValueError, match="has no build argument COLOUR"):
        read(path, {"COLOUR": "red"})


def test_our_images_run_as_a_user_and_find_flytes_entry_point() -> None:
    stages = read(OURS, {"PYTHON": "3.11"})
    assert [(stage.name, stage.base) for stage in stages] == [
        (name, "python:3.11-slim-bookworm") for name in ("wheels", "spark", "")
    ]
    for stage in stages[1:]:
        found = {each.name: each.rest for each in stage.instructions}
        assert found["USER"] == "1000" and f"PYTHONPATH={found['WORKDIR']}" in found["ENV"]
        assert any("ln -s /usr/local /opt/venv" in each.rest for each in stage.instructions)
