"""A file of trace events that can be read at any moment, also when its writer was killed."""

import os
from pathlib import Path

from farandole._native import append_to_trace

__all__ = ["TraceFile"]


class TraceFile:
    """A JSON array in Chrome's trace event format that is complete after each piece written to it.

    Making one opens the file, or creates it, and changes nothing in it before the first `append`. Raises `OSError` when
    it cannot be written."""

    def __init__(self, path: Path) -> None:
        # Of a pipe without a reader nothing is waited for, and no pipe can be written twice at one place.
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        self._end = 0  # where the closing bracket stands
        try:
            os.lseek(self._fd, 0, os.SEEK_CUR)
        except OSError:
            self.close()
            raise

    def append(self, events: bytes) -> None:
        """Add events, JSON objects with a comma and a line's end between two; what has been added is there when this
        raises `OSError`."""
        self._end, error = append_to_trace(self._fd, self._end, events)
        if error:
            raise OSError(error, os.strerror(error))

    def close(self) -> None:
        os.close(self._fd)
