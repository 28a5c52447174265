"""Folders and tables that grow: files that have arrived since the last listing, and whether more will follow."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from farandole.data.formats.file_systems import Files
from farandole.data.formats.parquet_files import ParquetFiles
from farandole.data.formats.partitions import base_of
from farandole.data.formats.places import Place, text_of
from farandole.data.formats.row_groups import File
from farandole.data.formats.sample_formats import FORMATS, Decode, make_format
from farandole.data.formats.samples import FileSource
from farandole.data.formats.source import DerivedSource, Source
from farandole.data.loading.agreement import Gather, together
from farandole.data.loading.state import NO_VERSION
from farandole.data.stores.urls import open_url
from farandole.data.tables.folders import TableFolder, find_table
from farandole.data.tables.marks import DELTA, ICEBERG, STREAM
from farandole.data.tables.stream_output import files_of_batches, stream_files
from farandole.errors import ConfigError, SourceError
from farandole.masking import mask

# The name of a marker file, a version, or a function of the paths of all files.
Until: TypeAlias = str | int | Callable[[Sequence[str]], bool]

_TABLES = {"delta": DELTA, "iceberg": ICEBERG, "stream": STREAM}


@dataclass(frozen=True, slots=True)
class Arrived:
    """Files that are read together as one generation; `last` is True if no generation follows.

    `version` is the table's version, NO_VERSION for a folder; `format` names the way to open the files."""

    files: tuple[File, ...]
    version: int
    format: str
    last: bool


class Seen:
    """The files that were read before, as two hashes for each: of its path, and of its size and mark."""

    def __init__(self, pairs: Iterable[int] = ()) -> None:
        numbers = list(pairs)
        self._content = dict(zip(numbers[::2], numbers[1::2], strict=True))

    def numbers(self) -> list[int]:
        """Return all hashes as one list; `Seen(numbers)` makes an equal object."""
        return [number for pair in self._content.items() for number in pair]

    def add(self, files: Iterable[File]) -> None:
        """Add files that were read."""
        self._content |= {_number(file.path): _number(f"{file.size} {file.mark}") for file in files}

    def new_of(self, files: Sequence[File]) -> list[File]:
        """Return the files that were not read before; raises `SourceError` for one that changed after it was read."""
        new = []
        for file in files:
            known = self._content.get(_number(file.path))
            if known is None:
                new.append(file)
            elif known != _number(f"{file.size} {file.mark}"):
                raise SourceError(file.path, "has changed after its rows were read; write new rows to new files")
        return new

    def lacks_none(self, files: Iterable[File]) -> bool:
        """Return whether `files` contain every file that was read before."""
        return self._content.keys() <= {_number(file.path) for file in files}


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


class Growing:
    """A folder or table at `url` to which files are added while it is read; for `GrowingLoader`.

    `until` ends the data. It is the name of a file in the folder that is written after the last data; the last version
    of a Delta table, or the last batch of a Spark stream; or a function that rank 0 calls with the paths of all files,
    and that returns True when they are complete. Without `until` the data never ends. `format` is "parquet", "delta",
    "iceberg", "stream" (the output of a Spark stream), or a format of `files`. By default a table is recognized by its
    folder, and all other files are read as Parquet. `decode`, `size` and `orient` are arguments of `files`. `classes`
    are the folders of images, in the order of their labels. `options` are the file system's. `least_files` is the
    number of new files to wait for before they are read, `poll` the seconds between listings, and `patience` the
    seconds to wait for new files.

    Files must appear complete: rename them into the folder, or write them to an object store. Raises `ConfigError` for
    settings that exclude each other.
    """

    def __init__(
        self,
        url: Place,
        *,
        until: Until | None = None,
        format: str | None = None,
        decode: Decode | None = None,
        size: tuple[int, int] | None = None,
        orient: bool = True,
        classes: Sequence[str] = (),
        options: Mapping[str, object] | None = None,
        least_files: int = 1,
        poll: float = 1.0,
        patience: float = 3600.0,
    ) -> None:
        known = ["parquet", *_TABLES, *FORMATS]
        if format not in (None, *known):
            raise ConfigError("format", f"must be one of {', '.join(known)}, got {format!r}")
        if (format == "images") != bool(classes):
            raise ConfigError("classes", "and format='images' need each other: later folders must have labels, too")
        if least_files < 1 or poll < 0 or patience <= 0:
            problem = f"must be >= 1, and poll >= 0 and patience > 0 seconds, got {least_files}, {poll} and {patience}"
            raise ConfigError("least_files", problem)
        if isinstance(until, int) and format not in (None, "delta", "stream"):
            raise ConfigError("until", f"is a version, but {format} has no consecutive versions")
        self._url, self._until, self._format, self._options = text_of(url), until, format, options
        self._decode = decode
        self._make_samples = partial(make_format, size=size, orient=orient, classes=classes)
        self.least_files, self.poll, self.patience = least_files, poll, patience
        self._store: Files | None = None

    def __str__(self) -> str:
        return mask(self._url)

    def look(self, seen: Seen) -> Arrived | None:
        """Return the files that are not in `seen`; None if they are too few yet. Makes requests: call it on one rank.

        Raises `SourceError` for files that changed after they were read, or that a table no longer has."""
        opened = self._opened(warn=True)
        most = self._until if isinstance(self._until, int) else None
        # Checked before the files are listed: the listing then has every file that was written before the marker.
        last = isinstance(self._until, str) and opened.exists(f"{self._folder()}/{self._until}")
        format = self._format or self._found_format(opened)
        if format in _TABLES:
            files, version = self._in_table(format, opened, None)
            if most is not None and version > most:
                files, version = self._in_table(format, opened, most)
            if format != "stream" and not seen.lacks_none(files):
                problem = "has removed or rewritten files of which rows were read; only add rows to it"
                raise SourceError(self._url, f"version {version} {problem}")
        else:
            # A folder has no versions. If `until` is one, a table's log will appear.
            files, version = self._in_folder(format, opened) if most is None else [], NO_VERSION
        if most is not None:
            last = version >= most
        elif callable(self._until):
            last = self._until([file.path for file in files])
        new = seen.new_of(files)
        return Arrived(tuple(new), version, format, last) if last or len(new) >= self.least_files else None

    def open(self, arrived: Arrived, gather: Gather | None) -> Source:
        """Open files that `look` returned; collective with `gather`; raises as `ParquetSource` and `files` do."""
        opened = together(lambda: self._opened(warn=False), gather)
        format, paths = arrived.format, [file.path for file in arrived.files]
        if format in ("delta", "iceberg"):
            return together(lambda: _Added(self._table(format, arrived.version, opened), set(paths)), gather)
        if format in FORMATS:
            return FileSource(opened, arrived.files, self._make_samples(format), self._decode, gather)
        files = stream_files(self._url, opened) if format == "stream" else opened
        base = base_of([self._folder()], paths, local=files.local)
        return ParquetFiles(files, arrived.files, base, gather)

    def _opened(self, *, warn: bool) -> Files:
        if self._store is None:
            self._store = Files.at(self._url, self._options, warn=warn)
        return self._store

    def _folder(self) -> str:
        """Return the path of the URL in its file system."""
        return open_url(self._url, self._options or {})[1].rstrip("/")

    def _in_folder(self, format: str, opened: Files) -> Sequence[File]:
        suffixes = FORMATS[format]().suffixes or "" if format in FORMATS else ".parquet"
        listed = Files.find(self._url, suffixes, self._options, opened=opened, growing=True)[1]
        if opened.web:
            raise SourceError(self._url, "is on a web server, which cannot list files as they arrive")
        return listed

    def _in_table(self, format: str, opened: Files, version: int | None) -> tuple[Sequence[File], int]:
        """Return all files of a table or a stream's output at this version, by default the newest, and the version."""
        if format != "stream":
            if find_table(self._url, self._options, opened) is None:
                return [], NO_VERSION
            source = self._table(format, version, opened)
            return list(dict.fromkeys(group.file for group in source.row_groups)), source.version
        if not opened.exists(f"{self._folder()}/{STREAM.mark}/"):
            return [], NO_VERSION
        newest, files = files_of_batches(self._url, self._options, version, opened)
        return files, NO_VERSION if newest is None else newest

    def _table(self, format: str, version: int | None, opened: Files) -> Source:
        return TableFolder(self._url, _TABLES[format]).open(self._options, version, opened)

    def _found_format(self, opened: Files) -> str:
        table = find_table(self._url, self._options, opened)
        if table is None:
            return "parquet"
        for name, kind in _TABLES.items():
            if kind == table.kind and (name != "iceberg" or not isinstance(self._until, int)):
                return name
        raise SourceError(self._url, f"is {table.kind.name}, which cannot be read until {self._until!r} as it grows")


class _Added(DerivedSource):
    """Source of the row groups in some files of a table."""

    # Both change in each generation, and a loader's state must not depend on them.
    version, choice = NO_VERSION, ""

    def __init__(self, source: Source, paths: set[str]) -> None:
        super().__init__(source, tuple(group for group in source.row_groups if group.file.path in paths))
