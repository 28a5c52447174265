"""Files of a store that are replaced as a whole: they are written under another name first."""

import os
import re
import time
import uuid
from contextlib import suppress
from pathlib import Path

ABANDONED = 3600.0  # seconds after which an unfinished file counts as left behind


def unfinished_name(name: str) -> str:
    """Return the name of a new file to write what `name` will hold; each writer has its own."""
    return f".{name}.{uuid.uuid4().hex}"


def is_left(file: str, name: str, modified: float) -> bool:
    """Return whether a process that was killed while it wrote `name` has left `file`."""
    is_unfinished = re.fullmatch(rf"\.{re.escape(name)}\.[0-9a-f]{{32}}", file) is not None
    return is_unfinished and time.time() - modified > ABANDONED


def replace_local(target: Path, content: bytes, former: str | None) -> None:
    """Replace the content of a local file at once; keep the old content in the file `former`, if it is given."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for each in target.parent.glob(".*"):
        with suppress(FileNotFoundError):  # another writer has removed it
            if is_left(each.name, target.name, each.stat().st_mtime):
                each.unlink()
    unfinished = target.with_name(unfinished_name(target.name))
    try:
        with unfinished.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        if former is not None and target.exists():
            target.replace(former)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
