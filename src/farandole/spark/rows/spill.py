"""A rank's rows on local disk: written once while the rank starts, mapped into its memory, and freed with it."""

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa

from farandole.spark.rows.disks import nameless_file, no_room

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Spill:
    """Arrow IPC streams in a file without a name, which the kernel frees when no process has it open any more."""

    file: BinaryIO
    rows: int

    def close(self) -> None:
        """Close this process's descriptor; a rank that has received one keeps the file."""
        self.file.close()


def spill(batches: Iterable[pa.RecordBatch], schema: pa.Schema, directory: str, *, stop: Callable[[], bool]) -> Spill:
    """Write `batches` as an Arrow IPC stream to a file in `directory`, uncompressed, so that it can be mapped.

    The file never has a name: the kernel frees it however task and rank end, also after `kill -9`, and other processes
    cannot find it. `schema` is used if there is no batch. Ends early if `stop()` is true after a batch. Raises
    `CacheError` naming the directory, for example if it is full."""
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
    # Errors of `batches` are Spark's own and propagate; errors of the disk become a `CacheError` with its name.
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
