"""Files of a data set in any file system of fsspec, and checks that they have not changed."""

import logging
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar
from urllib.parse import urlsplit

import fsspec
import pyarrow as pa
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem

from farandole._native import read_files
from farandole.data.formats.partitions import base_of
from farandole.data.formats.places import files_below, has_signs, inner_path, is_note, is_note_of_glob, warn_of_links
from farandole.data.formats.row_groups import File
from farandole.data.formats.source import Source
from farandole.data.loading.agreement import Gather, from_first, place_in, together
from farandole.data.stores.far_files import list_places, look_at, range_client
from farandole.data.stores.ranges import RangeClient, RangeFile, Span, changed_file, difference_of
from farandole.data.stores.urls import is_local, open_url, open_urls
from farandole.data.tables.marks import is_web, refuse_listed_table, refuse_table_above
from farandole.errors import FarandoleError, SourceError
from farandole.masking import hide_cause, mask, secret_values

T = TypeVar("T")

log = logging.getLogger(__name__)

# Threads that request sizes and marks of remote files; they wait most of the time.
_LOOKERS = 16
# Largest remote file for which `fetched` maps memory of the file's size.
_IMAGE_BYTES = 256 << 20


class OpenFile:
    """A file that is open for reading; `far` holds its ranges if it is read by ranges, else it is None."""

    def __init__(self, listed: File, stream: pa.NativeFile | None, far: RangeFile | None = None) -> None:
        self._listed, self._stream, self.far = listed, stream, far

    @property
    def stream(self) -> pa.NativeFile:
        """The stream that reads the file."""
        if self._stream is None:
            self._stream = pa.PythonFile(self.far, mode="r")
        return self._stream

    @property
    def file(self) -> File:
        """The file with the size and mark of its latest answer; as it was listed if it is not read by ranges."""
        return self._listed if self.far is None else self.far.file

    def fetch(self, spans: Callable[[], Iterable[Span]]) -> None:
        """Fetch ranges before they are read; does nothing for a file that is not read by ranges."""
        if self.far is not None:
            self.far.fetch(spans())

    def fetched(self) -> pa.NativeFile:
        """Return a stream for reading the fetched ranges.

        For a file of at most `_IMAGE_BYTES` that is read by ranges, the stream is memory with zeros outside of them:
        Arrow reads memory without Python's lock, and would take it several times per column for a Python file. For
        other files, returns `stream`."""
        if self.far is None or self.far.size > _IMAGE_BYTES:
            return self.stream
        return pa.BufferReader(pa.py_buffer(self.far.image()))

    def fetch_tail(self) -> None:
        """Fetch the end of the file, which holds the footer; does nothing for a file that is not read by ranges."""
        if self.far is not None:
            self.far.fetch_tail()


@dataclass(frozen=True)
class Files:
    """A file system of fsspec: local, s3, gs, abfs, hdfs, memory, ... Can be pickled."""

    fs: fsspec.AbstractFileSystem = field(default_factory=LocalFileSystem)
    # For files that are written once, such as a table's: the problem to report if one is missing. If set, the files'
    # marks are not the store's.
    gone: str = ""
    # Reads ranges, and checks with each range that the file has not changed.
    client: RangeClient | None = field(default=None, compare=False)
    verify: bool = False  # compare the checksums of Parquet's pages

    @classmethod
    def at(cls, url: str, options: Mapping[str, object] | None = None, *, warn: bool = True) -> "Files":
        """Return the file system of a URL, with a client for ranges if its store has one; makes no request.

        With `warn`, logs a warning if that client cannot be made. A new client takes half a second to connect, so keep
        the result."""
        fs, _ = open_url(url, options or {})
        return cls(fs, client=range_client(url, options or {}, fs, warn=warn))

    @classmethod
    def find(
        cls,
        urls: str | Sequence[str],
        suffix: str | tuple[str, ...],
        options: Mapping[str, object] | None = None,
        *,
        opened: "Files | None" = None,
        growing: bool = False,
    ) -> tuple["Files", list[File], str]:
        """List folders, globs and single files; `options` are the file system's.

        Returns the file system, the files sorted by path, and the folder below which folders' names are columns
        (`base_of`). In folders, names that begin with "_" or "." belong to other tools and are left out. So are files
        that do not end in `suffix`, in any case, unless no file does. `opened` is the result of `at` for these URLs;
        with it, files of web servers have no size yet, because asking costs a request. A `growing` folder may be empty
        or absent, and only its files that end in `suffix` count. Raises `SourceError` if there is no file, if the URLs
        belong to several file systems, and for the folder of a table that has a log, or a part of it.
        """
        asked = [urls] if isinstance(urls, str) else list(urls)
        if not asked or "" in asked:  # fsspec would read "" as the current folder
            raise SourceError(repr(urls), "no URL was given")
        places = open_urls(asked, options or {})
        fs = places[0][0]
        if any(other != fs for other, _ in places):
            raise SourceError(asked[0], "the URLs belong to several file systems; copy the data to one of them")
        files = cls(fs, client=None if opened is None else opened.client)
        listed, tops = files._list_all(asked, [place for _, place in places], suffix, growing)
        refuse_table_above(fs, sorted(tops), files.client)
        base = base_of([place for _, place in places], listed, local=files.local)
        return files, [listed[path] for path in sorted(listed)], base

    def __repr__(self) -> str:
        return f"Files({type(self.fs).__name__})"

    @property
    def local(self) -> bool:
        """Return whether the files are local."""
        return isinstance(self.fs, LocalFileSystem)

    def place(self, location: str) -> str:
        """Return the path in this file system for a file's URL or path."""
        if isinstance(self.fs, ArrowFSWrapper):
            parts = urlsplit(location)
            return f"{parts.netloc}{parts.path}" if parts.scheme else location
        return str(self.fs._strip_protocol(location))

    def look(self, paths: Sequence[str]) -> list[File]:
        """Return the current size and mark of each file; raises `SourceError` for a file that has vanished."""
        self.fs.invalidate_cache()
        if self.client is not None and paths:
            try:
                return look_at(self.client, paths)
            except Exception as error:
                with self.translating(str(error) if isinstance(error, FileNotFoundError) else paths[0]):
                    raise
        if self.local:
            return [self._look(path) for path in paths]
        with ThreadPoolExecutor(_LOOKERS, thread_name_prefix="farandole-look") as pool:
            return list(pool.map(self._look, paths))

    def check(self, files: Sequence[File]) -> None:
        """Raise `SourceError` naming the first file that has changed or vanished since it was listed."""
        for was, now in zip(files, self.look([file.path for file in files]), strict=True):
            self._compare(was, now)

    def _compare(self, was: File, now: File) -> None:
        if was.size != now.size if self.gone else was != now:
            raise changed_file(was.path, difference_of(was, now.size, now.mark))

    @property
    def web(self) -> bool:
        """Return whether the files are on a web server, which has no listings."""
        return is_web(self.fs)

    def exists(self, path: str) -> bool:
        """Return whether there is a file at `path`, or in folder `path` if it ends in "/"; raises `SourceError`."""
        with self.translating(path):
            if self.client is not None and not self.web:
                return any(file.path == path or path.endswith("/") for file in self.client.first_page(path))
            self.fs.invalidate_cache()
            return bool(self.fs.exists(path.rstrip("/")))

    def paths_in(self, folder: str) -> list[str]:
        """Return the paths that are in a folder now; raises `SourceError`, also for a missing folder."""
        with self.translating(folder):
            if self.client is not None and not self.web:
                listed = self.client.listing(f"{folder}/", None)
                if not listed:
                    raise FileNotFoundError(folder)
                return [file.path for file in listed if "/" not in file.path[len(folder) + 1 :]]
            self.fs.invalidate_cache()
            return [str(path) for path in self.fs.ls(folder, detail=False)]

    def content(self, path: str) -> bytes:
        """Return the bytes of a file as it is now; raises `SourceError`."""
        with self.translating(path):
            if self.client is None:
                return bytes(self.fs.cat_file(path))
            with RangeFile(self.client, File(path, -1, "")) as far:
                return far.read()

    @contextmanager
    def open(self, file: File) -> Iterator[pa.NativeFile]:
        """Open a file for reading; raises `SourceError` for errors of opening and of the body."""
        with self.fetching(file) as opened:
            yield opened.stream

    @contextmanager
    def fetching(self, file: File) -> Iterator[OpenFile]:
        """Open a file as `open` does, so that ranges can be fetched before they are read."""
        with self.reading(file):
            if self.client is not None:
                with RangeFile(self.client, replace(file, mark="") if self.gone else file) as far:
                    yield OpenFile(file, None, far)
            else:
                with self._opened(file) as opened:
                    yield OpenFile(file, opened)

    def read_here(self, file: File, first: int, last: int) -> bytes:
        """Return bytes `first` to `last` (-1: the end) of a local file; raises as `open` and `check` do.

        For small files, whose contents should be in memory at once."""
        with self.reading(file):
            found = self._read_parts([(file, first, last)])[0]
            if isinstance(found, OSError):
                raise found
        self._compare(file, found[1])
        return found[0]

    def read_each(self, parts: Sequence[tuple[File, int, int]]) -> list[bytes | None]:
        """Return the bytes of each part as `read_here` does, but None where it would raise an error."""
        found = self._read_parts(parts)
        return [
            None if isinstance(each, OSError) or each[1] != file else each[0]
            for (file, _, _), each in zip(parts, found, strict=True)
        ]

    def _read_parts(self, parts: Sequence[tuple[File, int, int]]) -> list[tuple[bytes, File] | OSError]:
        found = read_files([(file.path, first, file.size if last < 0 else last) for file, first, last in parts])
        return [
            each if isinstance(each, OSError) else (each[0], File(file.path, each[1], str(each[2])))
            for (file, _, _), each in zip(parts, found, strict=True)
        ]

    @contextmanager
    def reading(self, file: File) -> Iterator[None]:
        """Turn errors of the body, which reads `file`, into a `SourceError`."""

        def explain() -> None:
            if file.size >= 0:  # else it was not listed, and cannot be compared
                self.check([file])  # if the file has changed, that explains the error better

        missing = "has vanished since it was listed; open the data again"
        with self.translating(file.path, "cannot be read", missing, explain):
            yield

    @contextmanager
    def _opened(self, file: File) -> Iterator[pa.NativeFile]:
        if self.local:
            # Not mapped into memory: if a mapped file is truncated, reading it kills the process.
            with pa.OSFile(file.path, "rb") as opened:
                yield opened
        elif isinstance(self.fs, ArrowFSWrapper):
            with self.fs.fs.open_input_file(file.path) as opened:
                yield opened
        else:
            with self.fs.open(file.path, "rb") as stream, pa.PythonFile(stream, mode="r") as opened:
                yield opened

    @contextmanager
    def translating(
        self,
        path: str,
        problem: str = "cannot be looked at",
        missing: str = "is not there, or has vanished since it was listed",
        explain: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Turn the file system's errors in the body into a `SourceError` for `path`, after a call of `explain`.

        The error has `problem` and the file system's text without secrets, or `missing` for a file that is not there,
        unless `gone` is set."""
        try:
            yield
        except FarandoleError:
            raise
        except FileNotFoundError as error:
            raise SourceError(path, self.gone or missing) from hide_cause(error)
        except Exception as error:  # each file system has error classes of its own
            explain()
            secrets = secret_values(self.fs.storage_options)
            raise SourceError(path, mask(f"{problem}: {error}", *secrets)) from hide_cause(error, *secrets)

    def _look(self, path: str) -> File:
        with self.translating(path):
            if self.local:
                now = os.stat(path)  # follows links: a link does not change when its target does
                return File(path, now.st_size, str(now.st_mtime_ns))
            found = self.fs.info(path)
        marks = (found.get(name) for name in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "updated", "created"))
        return File(path, int(found["size"]), str(next((mark for mark in marks if mark is not None), "")))

    def _list_all(
        self, urls: Sequence[str], places: Sequence[str], suffix: str | tuple[str, ...], growing: bool
    ) -> tuple[dict[str, File], set[str]]:
        """Return the files by path, and the folders that hold them: given, matched, or those of single files."""
        plain = [place for place in places if not has_signs(place, local=self.local)]
        by_client = None
        if self.client is not None and plain:
            with self.translating(urls[0]):
                by_client = list_places(self.client, plain)
        known = dict(zip(plain, by_client or (), strict=by_client is not None))
        files: dict[str, File] = {}
        tops: set[str] = set()
        paths: set[str] = set()
        for url, place in zip(urls, places, strict=True):
            if place in known:
                listed, is_folder = known[place]
                found = {file.path: file for file in listed}
                chosen = self._chosen(place, list(found), suffix, growing) if is_folder else list(found)
                if not chosen and not growing:
                    raise SourceError(url, "is not there, or holds no file of data")
                files |= {path: found[path] for path in chosen}
                tops.add(posixpath.dirname(place.rstrip("/")))  # `_chosen` has checked the folder itself
            elif self.client is not None and self.web and place.endswith(suffix):
                files[place] = File(place, -1, "")
                tops.add(posixpath.dirname(place))
            else:
                with self.translating(url):
                    more, folders = self._list(url, place, suffix, growing)
                paths.update(more)
                tops.update(folders)
        looked = self.look(sorted(paths))
        warn_of_links(looked if self.local and not growing else [])
        return files | {file.path: file for file in looked}, tops

    def _list(self, url: str, place: str, suffix: str | tuple[str, ...], growing: bool) -> tuple[list[str], list[str]]:
        """Return files, and the folders that hold them: given, matched, or those of single files."""
        is_dir = os.path.isdir if self.local else self.fs.isdir  # fsspec's does not follow links
        if has_signs(place, local=self.local):
            found = [path for path in self.fs.glob(place) if not is_note_of_glob(path, place)]
            folders = [path for path in found if is_dir(path)]
            files = [path for path in found if path not in folders]
        else:
            # A folder may be made between the two looks, so whether there is anything is asked first.
            is_folder = (growing and not self.fs.exists(place)) or is_dir(place)
            folders, files = ([place], []) if is_folder else ([], [place])
        tops = [*folders, *{posixpath.dirname(path) for path in files}]
        for folder in folders:
            there, links = files_below(folder) if self.local and is_dir(folder) else (self.fs.find(folder), [])
            tops += links
            files += self._chosen(folder, there, suffix, growing)
        if not files and not growing:
            raise SourceError(url, "holds no file of data")
        return files, tops

    def _chosen(
        self, folder: str, everything: Sequence[str], suffix: str | tuple[str, ...], growing: bool
    ) -> list[str]:
        """Return the data files among all files in a folder; raises `SourceError` if they belong to a table."""
        refuse_listed_table(folder, everything)
        found = [path for path in everything if not is_note(inner_path(path, folder))]
        chosen = [path for path in found if path.lower().endswith(suffix)]
        if chosen and not growing and (others := sorted(set(found).difference(chosen))):
            log.warning("%d files that do not end in %s are left out, such as %s", len(others), suffix, mask(others[0]))
        return chosen if chosen or growing else found


def open_and_find(
    urls: str | Sequence[str],
    options: Mapping[str, object] | None,
    find: Callable[[Files], T],
    gather: Gather | None,
) -> tuple[Files, T]:
    """Open the store of `urls`, and return it with the result of `find`; collective with `gather`.

    In a store, rank 0 calls `find` for all ranks. If it fails on one rank, all ranks raise as `together` does."""
    first = urls if isinstance(urls, str) else next(iter(urls), "")
    if gather is None or is_local(urls, options):  # a local folder may be on each host's own disk
        opened = together(lambda: Files.at(first, options), gather)
        return opened, together(lambda: find(opened), gather)
    rank, _ = place_in(gather)
    opened = together(lambda: Files.at(first, options, warn=rank == 0), gather)
    return opened, from_first(lambda: find(opened), gather, rank)


class FilesSource(Source):
    """A source that reads the files `_listed` of the file system `_files` itself."""

    _files: Files
    _listed: Sequence[File]

    @property
    def in_flight(self) -> int:
        """See `Source.in_flight`."""
        return self._files.client.limiter.most if self._files.client is not None else 0

    def check(self) -> None:
        """Raise `SourceError` if a file has changed or vanished since it was opened."""
        self._files.check(self._listed)
