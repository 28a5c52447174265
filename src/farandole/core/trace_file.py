"""A file of trace events that can be read at any moment, also when its writer was killed."""

import os
import stat
from pathlib import Path

__all__ = ["TraceFile"]

_END = b"\n]\n"
_BETWEEN = b",\n"
_PIECE = 64 << 10  # bytes: a call for each page would cost four times as much. A kill within one cuts the file off


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
        at = 0
        while at < len(events):
            end = events.find(_BETWEEN, at + _PIECE)
            self._write(events[at:] if end < 0 else events[at:end])
            at = len(events) if end < 0 else end + len(_BETWEEN)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, events: bytes) -> None:
        if self._end == 0:
            self._cut()
        body = (_BETWEEN if self._end else b"[\n") + events
        # One call puts the events where the bracket was, and a bracket behind them.
        left = memoryview(body + _END)
        at = self._end
        try:
            while left:
                written = os.pwrite(self._fd, left, at)
                at, left = at + written, left[written:]
        except OSError:
            # The disk is full: there is room again for what was there.
            self._cut()
            os.pwrite(self._fd, _END, self._end)
            raise
        self._end += len(body)

    def _cut(self) -> None:
        if stat.S_ISREG(os.fstat(self._fd).st_mode):  # not /dev/null
            os.ftruncate(self._fd, self._end)
