"""Cache of row groups of remote files on the local disk, within a limit."""

import errno
import hashlib
import json
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from mmap import PROT_READ, mmap
from pathlib import Path

import pyarrow as pa

from farandole.data.formats.row_groups import RowGroup
from farandole.data.formats.source import DerivedSource, Source
from farandole.data.tables.versions import at_version
from farandole.errors import CacheError, ConfigError

log = logging.getLogger(__name__)

_SUFFIX = ".arrow"
_UNFINISHED = ".unfinished-"
# The folder is listed once for each of so many parts of its limit: listing it for each row group would take a time that
# grows with the number of files.
_PARTS = 128
_HEAD = 64  # bytes before the content; keeps Arrow's alignment
_ABANDONED = 3600.0  # seconds after which an unfinished file counts as left behind


class CachedSource(DerivedSource):
    """A cache of `source`: each row group is read once, and then mapped from a file in `folder`.

    A cache file's name is a hash of the original's path, size and mark, of the row group, of the columns' names and
    types, and of what chooses or decodes the rows. So the ranks of a host, and later jobs, can share a folder, and
    changed files are read anew. So are row groups whose cache file no longer matches its checksum, which is compared
    at each read. When the folder would hold more than `limit` bytes, the files that were used longest
    ago are removed; ranks that write at the same time may exceed the limit by a hundredth, or a row group, each. Raises
    `CacheError` when the folder cannot be written or the disk is full, `ConfigError` for samples whose `decode` cannot
    be pickled.
    """

    def __init__(self, source: Source, folder: str | os.PathLike[str], limit: int) -> None:
        if limit < 1:
            raise ConfigError("limit", f"must be >= 1 byte, got {limit}")
        super().__init__(source)
        folder = Path(folder)
        self._folder, self._limit = folder, limit
        self._room = 0  # bytes to write before the folder is listed again; threads may count a file too few
        if self.row_groups:
            self.identity(self.row_groups[0])  # raises here, not at the first read, if it is not to be had
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"{_UNFINISHED}*"):
                with suppress(FileNotFoundError):  # its rank has completed it, or another rank has removed it
                    if time.time() - left.stat().st_mtime > _ABANDONED:
                        left.unlink()
        except OSError as error:
            raise CacheError(str(folder), f"cannot be used ({error.strerror}); name another folder") from error

    def at(self, version: int) -> "CachedSource":
        """Return a cache, in the same folder, of another version of the source."""
        return CachedSource(at_version(self._source, version), self._folder, self._limit)

    def check(self) -> None:
        """Check all files of the source: they must not change, although cached row groups are not read again."""
        self._source.recheck()

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Read these columns of a row group, from the cache if it holds them."""
        path = self._folder / (self._name(row_group, columns) + _SUFFIX)
        found = self._load(path)
        if found is None:
            found = self._source.read(row_group, columns)
            if found.nbytes <= self._limit:
                self._store(path, found)
        return found

    def _name(self, row_group: RowGroup, columns: Sequence[str]) -> str:
        file = row_group.file
        typed = [[name, str(self.schema.field(name).type)] for name in columns]
        rows = [row_group.number, row_group.rows, self.identity(row_group)]
        content = json.dumps([file.path, file.size, file.mark, *rows, typed])
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def _load(self, path: Path) -> pa.Table | None:
        try:
            with pa.memory_map(str(path)) as mapped:
                head, content = mapped.read(_HEAD), mapped.read_buffer()
            if head != _head(content):
                raise OSError("its checksum does not match its content")
            with pa.ipc.open_file(content) as reader:
                table = reader.read_all()
        except FileNotFoundError:
            return None
        except (OSError, pa.ArrowException) as error:
            log.warning("%s cannot be used (%s) and is read anew", path, error)
            try:
                path.unlink(missing_ok=True)
            except OSError as kept:
                problem = f"holds {path.name}, which can neither be read nor removed ({kept.strerror})"
                raise CacheError(str(self._folder), f"{problem}; name another folder") from error
            return None
        with suppress(OSError):  # it belongs to another user, or another rank has removed it
            os.utime(path)
        return table

    def _store(self, path: Path, table: pa.Table) -> None:
        try:
            self._make_room(table.nbytes)
            descriptor, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=self._folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(bytes(_HEAD))
                    with pa.ipc.new_file(file, table.schema) as writer:
                        writer.write_table(table)
                    self._room -= file.tell()
                    file.flush()
                    with mmap(descriptor, 0, prot=PROT_READ) as mapped, memoryview(mapped)[_HEAD:] as content:
                        os.pwrite(descriptor, _head(content), 0)
                try:
                    os.replace(name, path)
                except FileNotFoundError:
                    # Removed by a job whose clock is more than an hour ahead of the file's.
                    log.warning("%s was removed before it was complete; its row group is read again next time", name)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            full = " or lower its limit" if error.errno == errno.ENOSPC else ""
            raise CacheError(
                str(self._folder), f"cannot hold {table.nbytes} bytes more ({error}); give it room{full}"
            ) from error

    def _make_room(self, nbytes: int) -> None:
        """Remove the files that were used longest ago. A process that has mapped one of them keeps its rows."""
        if nbytes <= self._room:
            return
        entries = []
        with os.scandir(self._folder) as listed:
            for entry in listed:
                if entry.name.endswith(_SUFFIX):
                    with suppress(FileNotFoundError):  # another rank has removed it
                        found = entry.stat()
                        entries.append((found.st_mtime_ns, found.st_size, entry.path))
        held = sum(size for _, size, _ in entries)
        room = max(nbytes, self._limit // _PARTS)
        for _, size, path in sorted(entries):
            if held + room <= self._limit:
                break
            Path(path).unlink(missing_ok=True)
            held -= size
        self._room = room


def _head(content: pa.Buffer | memoryview) -> bytes:
    """Return the first `_HEAD` bytes of a cache file with this content: a mark and a checksum."""
    return b"farandole crc32 %08x" % zlib.crc32(content) + bytes(_HEAD - 24)
