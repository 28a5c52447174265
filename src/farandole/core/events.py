"""TensorBoard event files, written without TensorFlow and without a thread."""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class EventFile:
    """One new event file in `folder`, which TensorBoard shows as one run (with the other files of that folder).

    Creates the folder. Scalars reach the file at `flush` and `close`. Raises `OSError` when it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files whose name holds "tfevents", in the order of their names.
        name = f"events.out.tfevents.{time.time_ns() // 1000}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._records = RecordWriter(self.path.open("xb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add one point to each of the curves named."""
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=points)))

    def flush(self) -> None:
        """Make what was added so far readable."""
        self._records.flush()

    def close(self) -> None:
        """Flush and close; nothing can be added any more."""
        self._records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
