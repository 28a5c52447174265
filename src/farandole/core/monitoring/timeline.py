"""Timeline of a rank's engines, as files for chrome://tracing and Perfetto.

The format is the array form of Chrome's trace event format, with a process per rank and a track per tensor."""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping

from farandole._native import Engine, TraceText
from farandole.core.monitoring.trace_file import TraceFile
from farandole.errors import ConfigError, EngineClosed, InvalidRequest
from farandole.timeline.files import generation_path, timeline_path
from farandole.timeline.names import Spelling

log = logging.getLogger(__name__)

QUIET_SECONDS = 0.05  # between two reads of the engines' events while the job is quiet
BUSY_SECONDS = 0.5  # while it is busy: fewer reads, because the thread needs Python's lock
BUSY_BYTES = 64 << 10  # events in one read that make a job busy; some 200 operations


class Timeline:
    """Writer of the events of one rank's engines, from each `start` to the next `stop`, in a thread of its own.

    The file can be read at any time. It has an event within 0.1 s while the job is quiet, and within 0.5 s while the
    job runs more than some 4,000 operations a second. It also holds the number of ranks, `size`, and `host`, because
    ranks of one host share a clock. Each `generation` of an elastic job has files of its own: a program's function is
    called again in each, and must not lose the events before a rank was lost."""

    def __init__(self, rank: int, size: int, host: str, generation: int = 0) -> None:
        self._rank, self._generation, self._process = rank, generation, os.getpid()
        self._about = {"name": f"rank {rank}", "host": host, "size": size}
        self._engines: dict[Engine, str] = {}
        self._file: TraceFile | None = None  # the file that is being written
        self._text = TraceText(rank)  # the text for that file
        self._marks_plans = self._closed = False
        self._dropped = 0
        self._changing = threading.Lock()  # held while the timeline starts or stops
        self._writing = threading.Lock()  # guards all fields
        self._stop = threading.Event()  # ends the thread
        self._thread: threading.Thread | None = None

    def start(self, path: str | os.PathLike[str], *, mark_plans: bool = False) -> None:
        """Complete the current file, if any, and write events from now on to the file of `path` for this rank.

        With `mark_plans` each plan is marked. Raises `ConfigError` if the file cannot be opened, and `RuntimeError` if
        the system refuses a thread; the current file then goes on. Raises `InvalidRequest` in a process forked from the
        rank."""
        self._require_own_process()
        if os.path.isdir(path) or os.fspath(path).endswith(os.sep):  # a path drops the last slash
            raise ConfigError("timeline", f"{os.fspath(path)} is a folder; name a file in it")
        where = timeline_path(generation_path(path, self._generation), self._rank)
        with self._changing:
            if self._closed:
                raise EngineClosed("it was shut down")
            try:
                file = TraceFile(where)
            except OSError as error:
                raise ConfigError("timeline", f"cannot write {where} ({error.strerror})") from error
            stop = threading.Event()
            thread = threading.Thread(target=self._run, args=(stop,), name="farandole-timeline", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the limit on threads
                file.close()
                raise
            self._end()
            self._thread, self._stop = thread, stop
            with self._writing:
                self._file, self._text, self._dropped = file, TraceText(self._rank), 0
                self._marks_plans = mark_plans
                for engine in self._engines:
                    engine.start_trace(mark_plans)
                # Afterwards, because a failed write stops the traces.
                self._append({"name": "process_name", "ph": "M", "pid": self._rank, "args": self._about})

    def stop(self) -> None:
        """Write the remaining events and complete the file; logs a warning if no timeline is being written.

        Raises `InvalidRequest` in a process forked from the rank."""
        self._require_own_process()
        with self._changing:
            if not self._end():
                log.warning("no timeline is being written: there is nothing to stop")

    def close(self) -> None:
        """Complete the file; a later `start` raises `EngineClosed`. Idempotent."""
        with self._changing:
            self._closed = True
            self._end()

    def follow(self, engine: Engine, label: str = "") -> None:
        """Trace `engine` from now on; `label` is put before the names of its tensors."""
        with self._writing:
            self._engines[engine] = label
            if self._file is not None:
                engine.start_trace(self._marks_plans)

    def leave(self, engine: Engine) -> None:
        """Write the remaining events of `engine`, and trace it no longer. Idempotent."""
        with self._writing:
            if engine in self._engines:
                self._let_go(engine)
                del self._engines[engine]

    def show(self, name: str, values: Mapping[str, float]) -> None:
        """Add the current values of the curves under `name`; does nothing while no timeline is being written.

        Values that are not finite are left out, because JSON cannot express them."""
        finite = {curve: value for curve, value in values.items() if math.isfinite(value)}
        now = {"name": name, "ph": "C", "ts": time.monotonic_ns() / 1e3, "pid": self._rank, "args": finite}
        with self._writing:
            self._append(now)

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise InvalidRequest("timeline", f"this process was forked from rank {self._rank}, whose timeline it is")

    def _end(self) -> bool:
        """Complete the file that is being written; return whether there was one."""
        if self._thread is None:
            return False
        self._stop.set()
        self._thread.join()
        self._thread = None
        with self._writing:
            for engine in self._engines:
                self._let_go(engine)
            if self._dropped:
                dropped = {"name": f"{self._dropped} events dropped", "ph": "i", "s": "g", "ts": 0}
                self._append({**dropped, "pid": self._rank, "tid": 0})
            was_there = self._file is not None
            self._abandon()
        return was_there

    def _run(self, stop: threading.Event) -> None:
        pause = QUIET_SECONDS
        while not stop.wait(pause):
            with self._writing:
                written = sum(self._append_events(engine, label) for engine, label in self._engines.items())
            pause = BUSY_SECONDS if written > BUSY_BYTES else QUIET_SECONDS

    def _let_go(self, engine: Engine) -> None:
        if self._file is not None:
            engine.stop_trace()
            self._append_events(engine, self._engines[engine])
            self._dropped += engine.stats()["trace_dropped"]

    def _append_events(self, engine: Engine, label: str) -> int:
        """Write the events of `engine` since the last call; return their size in bytes."""
        written = 0
        self._text.take(engine, label)
        while events := self._text.next():
            self._append(Spelling.of_events(events))
            written += len(events)
        return written

    def _append(self, event: Mapping[str, object] | bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.append(event if isinstance(event, bytes) else json.dumps(event).encode())
        except OSError as error:
            # The timeline is optional, so its failure must not end the training.
            log.error("the timeline ends here: it cannot be written any more (%s)", error.strerror)
            self._abandon()

    def _abandon(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self._file = None
        for engine in self._engines:
            engine.stop_trace()
            self._text.take(engine, "")  # discard the remaining events
