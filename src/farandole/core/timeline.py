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
    """A file that follows an engine: drains its trace, on a thread of its own, until closed.

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
        self._engine: Engine | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farandole-timeline", daemon=True)

    def follow(self, engine: Engine) -> None:
        """Start to write what `engine` does."""
        self._engine = engine
        self._thread.start()

    def close(self) -> None:
        """Write what is left and complete the file. Idempotent."""
        if self._file.closed:
            return
        if self._engine is not None:
            self._stop.set()
            self._thread.join()
            self._drain(self._engine)
        dropped = self._engine.stats()["trace_dropped"] if self._engine is not None else 0
        if dropped:
            self._write(
                {"name": f"{dropped} events dropped", "ph": "i", "s": "g", "ts": 0, "pid": self._rank, "tid": 0}
            )
        self._file.write("\n]\n")
        self._file.close()

    def _run(self) -> None:
        while self._engine is not None and not self._stop.wait(DRAIN_SECONDS):
            self._drain(self._engine)

    def _drain(self, engine: Engine) -> None:
        for name, phase, begin, end, size in engine.trace():
            self._write(
                {
                    "name": phase,
                    "cat": "collective",
                    "ph": "X",
                    "ts": begin / 1e3,
                    "dur": (end - begin) / 1e3,
                    "pid": self._rank,
                    "tid": self._track(name),
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
