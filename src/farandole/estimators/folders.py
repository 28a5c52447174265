"""Files in a folder of one of Spark's file systems, for classic and Spark Connect sessions."""

from collections.abc import Iterator
from typing import Any, Protocol

from pyspark.errors import AnalysisException
from pyspark.ml.util import MLWriter
from pyspark.sql import SparkSession

from farandole.errors import ConfigError
from farandole.spark.jobs.application import is_connect

CHUNK = 2 << 20  # bytes per transfer; a batch of Spark Connect's results has up to 4 MiB
_PARTS = "part int, content binary"


class Folder(Protocol):
    """A folder; its methods block for as long as the file system does."""

    def write(self, name: str, content: bytes) -> None:
        """Write a new file."""

    def read(self, name: str) -> bytes:
        """Return a file's content; raises `ConfigError` when there is no such file."""


def folder_of(spark: SparkSession, path: str) -> Folder:
    """Return the folder at `path`, in a file system of the session, or of the server with Spark Connect."""
    return ConnectFolder(spark, path) if is_connect(spark) else ClassicFolder(spark, path)


def overwrite(spark: SparkSession, path: str) -> None:
    """Remove the file or folder at `path`, if there is one."""
    if is_connect(spark):
        from pyspark.ml.connect.readwrite import RemoteMLWriter

        RemoteMLWriter.handleOverwrite(path, True)
    else:
        writer = MLWriter().session(spark)
        writer._handleOverwrite(path)


class ClassicFolder:
    """A folder that the driver's Java process reads and writes."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.path, self._spark = path.rstrip("/"), spark
        self._jvm, self._java = spark._jvm, spark._jsc

    def write(self, name: str, content: bytes) -> None:
        """Write a new file."""
        files, path = self._find(name)
        out = files.create(path, False)
        try:
            for part in _parts(content):
                out.write(bytearray(part))
        finally:
            out.close()

    def read(self, name: str) -> bytes:
        """Return the content of a file, or of the table that `ConnectFolder` wrote under its name."""
        files, path = self._find(name)
        if not files.exists(path):
            files, path = self._find(_table(name))
            if files.exists(path):
                return _read_table(self._spark, f"{self.path}/{_table(name)}")
            raise _missing(self.path, name)
        parts, stream = [], files.open(path)
        try:
            while part := bytes(stream.readNBytes(CHUNK)):
                parts.append(part)
        finally:
            stream.close()
        return b"".join(parts)

    def _find(self, name: str) -> tuple[Any, Any]:
        path = self._jvm.org.apache.hadoop.fs.Path(f"{self.path}/{name}")  # type: ignore[union-attr]
        return path.getFileSystem(self._java.hadoopConfiguration()), path


class ConnectFolder:
    """A folder that a Spark Connect server reads and writes; it writes only tables, so a file is a table of pieces."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.path, self._spark = path.rstrip("/"), spark

    def write(self, name: str, content: bytes) -> None:
        """Write a new table with the content in pieces."""
        rows = self._spark.createDataFrame([*enumerate(_parts(content))], _PARTS)
        rows.coalesce(1).write.parquet(f"{self.path}/{_table(name)}")

    def read(self, name: str) -> bytes:
        """Return the content of a table of `write`, or of a file that a classic session wrote."""
        try:
            return _read_table(self._spark, f"{self.path}/{_table(name)}")
        except AnalysisException:  # there is no such table
            return self._read_file(name)

    def _read_file(self, name: str) -> bytes:
        files = self._spark.read.format("binaryFile").load(f"{self.path}/{name}")
        # An `explode` of the starts would copy the whole content to the row of each piece.
        starts = f"sequence(0, greatest(int(length) - 1, 0), {CHUNK})"
        piece = f"start -> struct(start, substring(content, start + 1, {CHUNK}) AS piece)"
        try:
            rows = files.selectExpr(f"inline(transform({starts}, {piece}))").collect()
        except AnalysisException as error:
            raise _missing(self.path, name) from error
        return b"".join(bytes(row["piece"]) for row in sorted(rows, key=lambda row: int(row["start"])))


def _parts(content: bytes) -> Iterator[bytes]:
    for first in range(0, max(1, len(content)), CHUNK):
        yield content[first : first + CHUNK]


def _table(name: str) -> str:
    return f"{name}.parquet"


def _read_table(spark: SparkSession, path: str) -> bytes:
    rows = spark.read.parquet(path).collect()
    return b"".join(bytes(row["content"]) for row in sorted(rows, key=lambda row: int(row["part"])))


def _missing(path: str, name: str) -> ConfigError:
    return ConfigError("path", f"{path} has no file {name!r}; it was not saved by farandole, or not completely")
