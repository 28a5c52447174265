"""Output of ranks: their lines on the launcher's own streams, each after its rank's number, and in files."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Container
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from farandole.errors import ConfigError


class Output:
    """Prints each line of each rank as "[rank] line"; a context manager, called from the threads of all ranks.

    Lines keep their stream, standard output or standard error, and are never mixed. With `directory`, the files
    `rank.<rank>/stdout` and `stderr` in it get the lines too, without the prefix. Of `shown`, if given, are the ranks
    whose lines are printed; the files get those of all ranks."""

    def __init__(
        self,
        num_proc: int,
        *,
        timestamp: bool = False,
        directory: Path | None = None,
        shown: Container[int] | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self._streams = {
            "stdout": sys.stdout if stdout is None else stdout,
            "stderr": sys.stderr if stderr is None else stderr,
        }
        self._timestamp, self._shown = timestamp, shown
        self._writing = threading.Lock()
        self._files: dict[tuple[int, str], TextIO] = {}
        self._directory, self._digits = directory, len(str(num_proc - 1))
        with contextlib.ExitStack() as undo:
            undo.callback(self._close)
            try:
                for rank in range(num_proc) if directory is not None else ():
                    self._open(rank)
            except OSError as error:
                raise ConfigError("output_filename", f"cannot write {error.filename}: {error.strerror}") from error
            undo.pop_all()
        self._incomplete = False  # whether a write to a file has failed, which was reported
        self.refused: OSError | None = None  # raised by the first call that could not write its line
        self.rank_of: Callable[[int], int] = int  # of a member of an elastic job, whose rank may change

    def __call__(self, rank: int, stream: str, line: str) -> None:
        """Write one line; raises `OSError` when the stream is closed, or a file cannot be written, which it names."""
        stamp = self.stamp(datetime.now()) if self._timestamp else ""
        with self._writing:
            try:
                if self._directory is not None:
                    if (rank, stream) not in self._files:
                        self._open(rank)  # a process that an elastic job has started later
                    self._write_to_file(self._files[rank, stream], f"{stamp}{line}\n")
                if self._shown is None or self.rank_of(rank) in self._shown:
                    self._print(stream, f"{stamp}{self.heading(rank, stream)}{line}\n")
            except OSError as error:
                self.refused = self.refused or error
                raise

    def _print(self, stream: str, text: str) -> None:
        out = self._streams[stream]
        try:
            out.write(text)
        except UnicodeEncodeError:
            out.write(text.encode(out.encoding, "backslashreplace").decode(out.encoding))
        out.flush()

    def _open(self, rank: int) -> None:
        folder = Path(self._directory or "", f"rank.{rank:0{self._digits}}")
        folder.mkdir(parents=True, exist_ok=True)
        for stream in self._streams:
            self._files[rank, stream] = (folder / stream).open("w", encoding="utf-8", buffering=1)

    def _write_to_file(self, file: TextIO, text: str) -> None:
        try:
            file.write(text)
        except OSError as error:
            self._incomplete = True
            raise OSError(error.errno, error.strerror, file.name) from error

    def heading(self, rank: int, stream: str) -> str:
        """Return the prefix of a line of `rank` on the stream "stdout" or "stderr"."""
        return f"[{rank}] "

    def stamp(self, now: datetime) -> str:
        """Return the text for the time, which precedes the heading."""
        return f"{now.isoformat(' ', 'milliseconds')} "

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files; raises `ConfigError` naming a file that lacks lines, unless a call has reported one.

        If the block raises `error`, adds a note to it instead."""
        problems = self._close()
        if not problems or self._incomplete:
            return
        if error is None:
            raise ConfigError("output_filename", problems[0])
        error.add_note(f"output_filename: {problems[0]}")

    def _close(self) -> list[str]:
        """Close the files; return a sentence for each that could not take its last lines."""
        problems = []
        for file in self._files.values():
            try:
                file.close()
            except OSError as late:  # a quota or a network file system may report an error only now
                problems.append(f"cannot write {file.name}: {late.strerror}")
        return problems


def prepare_streams() -> None:
    """Open the null device for each standard stream that is closed, and let writes to the others block.

    Some daemons start their children with closed streams: a connection could get the descriptor of one, and receive
    what is written to it. A stream that another process has made non-blocking would refuse lines of a busy job."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            lowest = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, so the stream's own
            setattr(sys, name, os.fdopen(lowest, mode, encoding="utf-8"))
    for descriptor in (1, 2):
        os.set_blocking(descriptor, True)
