"""Paths of the timelines that a job's ranks write, from the path of one of them."""

import os
import re
from pathlib import Path

DYNAMIC = "DYNAMIC"  # Horovod's value for a timeline that `start_timeline` starts later


def timeline_path(path: str | os.PathLike[str], rank: int) -> Path:
    """Return the file of `rank`: `path` for rank 0, `<stem>.rank<r><suffix>` beside it for rank r."""
    whole = Path(path)
    return whole if rank == 0 else whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}")


def generation_path(path: str | os.PathLike[str], generation: int) -> Path:
    """Return the path for the ranks of a generation of an elastic job: `path` for the first one, number 0, and
    `<stem>.generation<g><suffix>` beside it for generation g."""
    return _numbered(path, "generation", generation)


def restart_path(path: str | os.PathLike[str], restart: int) -> Path:
    """Return the path for an attempt of a job: `path` for the first one, and `<stem>.restart<r><suffix>` beside it
    after restart r, so that the failed attempt's trace is kept."""
    return _numbered(path, "restart", restart)


def _numbered(path: str | os.PathLike[str], word: str, number: int) -> Path:
    whole = Path(path)
    return whole if number == 0 else whole.with_name(f"{whole.stem}.{word}{number}{whole.suffix}")


def sibling_paths(path: Path) -> list[Path]:
    """Return the files of the other ranks beside `path`, the file of rank 0, by rank; none if it is another rank's."""
    name = re.compile(rf"{re.escape(path.stem)}\.rank([1-9][0-9]*){re.escape(path.suffix)}")
    if not path.parent.is_dir():
        return []
    found = ((name.fullmatch(each.name), each) for each in path.parent.iterdir())
    return [each for _, each in sorted((int(match[1]), each) for match, each in found if match)]
