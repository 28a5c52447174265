"""A rank's rows on local disk: written once while the rank starts, mapped into memory by it, and never left behind."""

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa

from farandole.errors import CacheError

__all__ = ["Spill", "local_directory", "spill"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Spill:
    """An Arrow IPC file without a name; its space is free again when the last process that holds it is gone."""

    file: BinaryIO
    rows: int

    def close(self) -> None:
        """Let go of it; a rank that received the descriptor keeps its own hold."""
        self.file.close()


def spill(batches: Iterable[pa.RecordBatch], schema: pa.Schema, directory: str, *, stop: Callable[[], bool]) -> Spill:
    """Write `batches` to one Arrow IPC file in `directory`, uncompressed, so that it can be mapped.

    The file never has a name: however task and rank end, by `kill -9` too, the kernel frees it, and nobody else can
    open it. `schema` serves when there is no batch. Ends early when `stop` says so after a batch.
    Raises `CacheError` naming the directory, when it is full for example."""
    started = time.monotonic()
    try:
        file = tempfile.TemporaryFile(dir=directory, prefix="farandole-", suffix=".arrow")  # noqa: SIM115
    except OSError as error:
        raise _named(error, directory) from error
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
    writer: pa.ipc.RecordBatchFileWriter | None = None
    # Errors of `batches` are Spark's own and pass; what the disk says needs the name of the disk.
    with pa.OSFile(f"/proc/self/fd/{file.fileno()}", "wb") as sink:
        for batch in batches:
            try:
                if writer is None:
                    writer = pa.ipc.new_file(sink, batch.schema)
                writer.write_batch(batch)
            except OSError as error:
                raise _named(error, directory) from error
            rows += batch.num_rows
            if stop():
                break
        try:
            if writer is None:
                writer = pa.ipc.new_file(sink, schema)
            writer.close()
        except OSError as error:
            raise _named(error, directory) from error
    return rows


def _named(error: OSError, directory: str) -> CacheError:
    return CacheError(directory, f"cannot hold the rank's rows ({error}); give spark.local.dir more room")


def local_directory(env: Mapping[str, str], turn: int) -> str:
    """Choose among the executor's local directories, `turn` by turn, so that the ranks of a host use all disks."""
    # YARN's and the other managers' names, in the order in which Spark itself looks.
    for name in ("LOCAL_DIRS", "SPARK_LOCAL_DIRS"):
        directories = [each for each in env.get(name, "").split(",") if each and os.access(each, os.W_OK)]
        if directories:
            return directories[turn % len(directories)]
    return tempfile.gettempdir()
