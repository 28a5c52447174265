"""Output of ranks as `horovodrun`, `horovod.run` and `horovod.spark.run` print it, for programs that read it."""

import io
import re
import sys
from datetime import datetime
from typing import TextIO

from farandole.launch.output import Output

_RANK = re.compile(r"^\[([0-9]+)\] ", re.MULTILINE)


class HorovodOutput(Output):
    """Prints each line of each rank as "[rank]<stdout>:line" or "[rank]<stderr>:line"."""

    def heading(self, rank: int, stream: str) -> str:
        """Return "[0]<stdout>:"."""
        return _tag(rank, stream)

    def stamp(self, now: datetime) -> str:
        """Return the time in Horovod's format: "Fri Jan 10 10:00:00 2020"."""
        return _spelled(now)


class _Tagged(io.TextIOBase):
    def __init__(self, stream: str, target: TextIO | None, timestamp: bool) -> None:
        self._stream, self._target, self._timestamp = stream, target, timestamp

    def write(self, text: str) -> int:
        target = getattr(sys, self._stream) if self._target is None else self._target
        stamp = _spelled(datetime.now()) if self._timestamp else ""
        target.write(_RANK.sub(lambda found: f"{stamp}{_tag(found[1], self._stream)}", text))
        target.flush()
        return len(text)


def tagged(stream: str, target: TextIO | None, timestamp: bool) -> TextIO:
    """Return a file that takes whole lines "[rank] line" and writes them to `target` in the format of `HorovodOutput`.

    Without a `target` it writes to `sys.stdout` or `sys.stderr`, according to `stream`, at the time of each write."""
    return _Tagged(stream, target, timestamp)  # type: ignore[return-value]  # its users only write text and flush


def _tag(rank: int | str, stream: str) -> str:
    return f"[{rank}]<{stream}>:"


def _spelled(now: datetime) -> str:
    return now.strftime("%a %b %d %H:%M:%S %Y")
