"""A rank's rows on local disk: written once while the rank starts, mapped into memory by it, and never left behind."""

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa

from farandole.spark.disks import nameless_file, no_room

__all__ = ["Spill", "spill"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Spill:
    """Arrow IPC streams in a file without a name; its space is free again when no process has it open any more."""

    file: BinaryIO
    rows: int

    def close(self) -> None:
        """Let go of it; a rank that received the descriptor keeps its own hold."""
        self.file.close()


def spill(batches: Iterable[pa.RecordBatch], schema: pa.Schema, directory: str, *, stop: Callable[[], bool]) -> Spill:
    """Write `batches` as an Arrow IPC stream to a file in `directory`, uncompressed, so that it can be mapped.

    The file never has a name: however task and rank end, by `kill -9` too, the kernel frees it, and no one else can
    open it. `schema` serves when there is no batch. Ends early when `stop` says so after a batch.
    Raises `CacheError` naming the directory, when it is full for example."""
    started = time.monotonic()
    file = nameless_file(directory)
    try:
        rows = _write(file, batches, schema, directory, stop)
    except BaseException:
        file.close()
        raise
    log.info("%d rows, %d bytes written in %.1f s", rows, os.fstat(file.fileno()).st_size, time.monotonic() - started)
    return Spill(file, rows)


def _write(
    file: BinaryIO,
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    directory: str,
    stop: Callable[[], bool],
) -> int:
    rows = 0
    writer: pa.ipc.RecordBatchStreamWriter | None = None
    # Errors of `batches` are Spark's own and pass; what the disk says needs the name of the disk.
    with pa.OSFile(f"/proc/self/fd/{file.fileno()}", "wb") as sink:
        for batch in batches:
            try:
                if writer is None:
                    writer = pa.ipc.new_stream(sink, batch.schema)
                writer.write_batch(batch)
            except OSError as error:
                raise no_room(error, directory) from error
            rows += batch.num_rows
            if stop():
                break
        try:
            if writer is None:
                writer = pa.ipc.new_stream(sink, schema)
            writer.close()
        except OSError as error:
            raise no_room(error, directory) from error
    return rows
