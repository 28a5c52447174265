"""The timeline: what the engine did when, as a file that chrome://tracing and Perfetto open.

The format is Chrome's trace event format, array form. One process per rank, one track per tensor."""

import json
import threading
from pathlib import Path

from farandole._native import Engine
from farandole.errors import ConfigError

__all__ = ["Timeline", "timeline_path"]

DRAIN_SECONDS = 0.5


def timeline_path(path: str, rank: int) -> Path:
    """Where `rank` writes: rank 0 at `path`, rank r beside it as `<stem>.rank<r><suffix>`."""
    whole = Path(path)
    return whole if rank == 0 else whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}")


class Timeline:
    """A file that follows engines of one rank: drains their traces, on a thread of its own, until closed.

    Making one opens the file; raises `ConfigError` when that cannot be."""

    def __init__(self, path: str, rank: int) -> None:
        self._rank = rank
        self._tracks: dict[str, int] = {}
        where = timeline_path(path, rank)
        try:
            self._file = where.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError("timeline", f"cannot write {where} ({error.strerror})") from error
        self._write({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}, first=True)
        self._engines: dict[Engine, str] = {}
        self._dropped = 0
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farandole-timeline", daemon=True)
        self._thread.start()

    def follow(self, engine: Engine, label: str = "") -> None:
        """Start to write what `engine` does; `label` stands before the names of its tensors."""
        with self._writing:
            self._engines[engine] = label

    def leave(self, engine: Engine) -> None:
        """Write what `engine` has done since, and follow it no longer. Idempotent."""
        with self._writing:
            if engine not in self._engines:
                return
            self._drain(engine, self._engines.pop(engine))
            self._dropped += engine.stats()["trace_dropped"]

    def close(self) -> None:
        """Write what is left and complete the file. Idempotent."""
        if self._file.closed:
            return
        self._stop.set()
        self._thread.join()
        for engine in list(self._engines):
            self.leave(engine)
        if self._dropped:
            self._write(
                {"name": f"{self._dropped} events dropped", "ph": "i", "s": "g", "ts": 0, "pid": self._rank, "tid": 0}
            )
        self._file.write("\n]\n")
        self._file.close()

    def _run(self) -> None:
        while not self._stop.wait(DRAIN_SECONDS):
            with self._writing:
                for engine, label in self._engines.items():
                    self._drain(engine, label)

    def _drain(self, engine: Engine, label: str) -> None:
        for name, phase, begin, end, size in engine.trace():
            self._write(
                {
                    "name": phase,
                    "cat": "collective",
                    "ph": "X",
                    "ts": begin / 1e3,
                    "dur": (end - begin) / 1e3,
                    "pid": self._rank,
                    "tid": self._track(f"{label}{name}"),
                    "args": {"tensor": name, "bytes": size},
                }
            )
        self._file.flush()

    def _track(self, name: str) -> int:
        if name not in self._tracks:
            self._tracks[name] = len(self._tracks) + 1
            track = {"pid": self._rank, "tid": self._tracks[name]}
            self._write({"name": "thread_name", "ph": "M", "args": {"name": name}, **track})
        return self._tracks[name]

    def _write(self, event: dict[str, object], *, first: bool = False) -> None:
        self._file.write(("[\n" if first else ",\n") + json.dumps(event))
