"""Files with the output and the exit codes of ranks that outlive their launcher, for the launcher that takes over.

On the launcher's machine the guard of each rank writes these files itself, because it imports no module of ours."""

import contextlib
from pathlib import Path

END = ".end"  # suffix of a rank's log: the file with its exit code; `guard.py` writes the same name


def append_line(log: str, line: str) -> None:
    """Append a line to the log of a rank; makes the folder, for this user alone."""
    path = _path(log)
    with path.open("a") as file:
        file.write(f"{line}\n")


def note_end(log: str, code: int) -> None:
    """Note that the rank with this log has ended with an exit code; does nothing if the disk refuses."""
    with contextlib.suppress(OSError):  # the next launcher then counts the rank as lost
        _path(log + END).write_text(str(code))


def noted_end(log: str) -> int | None:
    """Return the exit code of the rank with this log; None if it has not ended without its launcher."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is being written
        return int(Path(log + END).expanduser().read_text())
    return None


def _path(name: str) -> Path:
    path = Path(name).expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
