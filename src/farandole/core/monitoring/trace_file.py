"""File of trace events that can be read at any time, also after its writer was killed."""

import os
from pathlib import Path

from farandole._native import append_to_trace


class TraceFile:
    """JSON array in Chrome's trace event format, which is complete after each `append`.

    The constructor opens or creates the file; an existing file stays unchanged until the first `append`. It raises
    `OSError` if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        # O_NONBLOCK: a pipe without a reader raises an error and does not block. `lseek` refuses all pipes.
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        self._end = 0  # offset of the closing bracket
        try:
            os.lseek(self._fd, 0, os.SEEK_CUR)
        except OSError:
            self.close()
            raise

    def append(self, events: bytes) -> None:
        """Append events, which are JSON objects separated by a comma and a line end.

        Raises `OSError` if a write fails; the file is then complete with the events before that write."""
        self._end, error = append_to_trace(self._fd, self._end, events)
        if error:
            raise OSError(error, os.strerror(error))

    def close(self) -> None:
        os.close(self._fd)
