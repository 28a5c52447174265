"""Ranges of far files: clients that fetch them with a check of the file's mark, and files made of fetched ranges."""

import io
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from farandole.data.flight import Flight, PassingFailure
from farandole.data.row_groups import File
from farandole.errors import SourceError

__all__ = [
    "TAIL_BYTES",
    "ChangedFile",
    "PagedStore",
    "Part",
    "RangeClient",
    "RangeFile",
    "Span",
    "changed_file",
    "coalesce",
    "content_range",
    "difference_of",
    "range_header",
]

TAIL_BYTES = 64 << 10  # a footer is fetched with one request if it is not larger
# Unwanted bytes between two ranges that cost less than another request would.
_HOLE_BYTES = 1 << 20
_LEAST_BYTES = 64 << 10  # of a range that was not fetched ahead
_SMALL_BYTES = 256 << 10  # of a file for which mapping memory would take longer than zeroing it


class ChangedFile(Exception):
    """The file is no longer the one with the mark that was asked for."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `first` to `last` (half-open) of a file."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a file from `first` on, and the whole file's size and mark."""

    first: int
    data: bytes
    size: int
    mark: str

    @property
    def last(self) -> int:
        """The place after the last byte."""
        return self.first + len(self.data)

    def complete(self, asked: Span | None) -> "Part":
        """Return this part; raises `PassingFailure` if it ends before the span that was asked for, and the file, do."""
        missing = min(self.size, self.size if asked is None else asked.last) - self.last
        if missing > 0:
            raise PassingFailure(f"the body is {missing} bytes short")
        return self


class RangeClient(Protocol):
    """Access to one store; used from any thread. Can be pickled."""

    flight: Flight

    def url(self, path: str) -> str:
        """Return the URL of a path, for errors."""
        ...

    def fetch(self, path: str, span: Span | None, mark: str) -> Part:
        """Fetch a span, or the last `TAIL_BYTES`, with one request; `mark` is that of the file, or empty.

        Raises `ChangedFile`, `FileNotFoundError`, and `PassingFailure` where another attempt may succeed."""
        ...

    def listing(self, prefix: str, most_pages: int | None) -> list[File] | None:
        """List all files whose paths begin with `prefix`; None if the store has no listings, or needs more pages."""
        ...

    def first_page(self, prefix: str) -> list[File]:
        """List the first files whose paths begin with `prefix`, as many as one request returns."""
        ...

    def look(self, path: str) -> File:
        """Look at one file; raises `FileNotFoundError`, and `PassingFailure`."""
        ...


class PagedStore(ABC):
    """The listings of a store that returns them in pages."""

    @abstractmethod
    def page(self, prefix: str, more: str) -> tuple[list[File], str]:
        """Return a page of a listing, and the token of the next one; empty tokens: of the first page, after the last.

        Raises what `RangeClient.listing` does."""

    def listing(self, prefix: str, most_pages: int | None) -> list[File] | None:
        """See `RangeClient.listing`."""
        found: list[File] = []
        more, pages = "", 0
        while most_pages is None or pages < most_pages:
            files, more = self.page(prefix, more)
            found += files
            pages += 1
            if not more:
                return found
        return None

    def first_page(self, prefix: str) -> list[File]:
        """See `RangeClient.first_page`."""
        return self.page(prefix, "")[0]


class RangeFile(io.RawIOBase):
    """A far file for reading; ranges that were fetched ahead are in memory, others are fetched as they are read.

    All ranges have the same mark: a file that has changed meanwhile is a `SourceError`."""

    def __init__(self, client: RangeClient, file: File) -> None:
        super().__init__()
        self._client, self.file = client, file
        self._parts: list[Part] = []
        self._place = 0

    def fetch(self, spans: Iterable[Span]) -> None:
        """Fetch these ranges, near ones together; blocks until all are there."""
        asked = coalesce(spans)
        if len(asked) == 1:
            self._keep(self._get(asked[0]))
        elif asked:
            with ThreadPoolExecutor(len(asked), thread_name_prefix="farandole-range") as pool:
                for part in pool.map(self._get, asked):
                    self._keep(part)

    def image(self) -> bytearray | mmap.mmap:
        """Return memory of the file's size with the fetched ranges in their places, and zeros elsewhere.

        Pages of a large file that hold nothing take no memory."""
        made: bytearray | mmap.mmap
        if self.size <= _SMALL_BYTES:
            made = bytearray(max(1, self.size))
        else:
            made = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for part in self._parts:
            made[part.first : part.last] = part.data
        return made

    def fetch_tail(self) -> None:
        """Fetch the end of the file, which shows its size and mark."""
        part = self._get(None)
        self.file = replace(self.file, size=part.size, mark=part.mark)
        self._keep(part)

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        if self.file.size < 0:
            self.fetch_tail()
        return self.file.size

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the place of the next read."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a place; see `io.IOBase.seek`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place}.get(whence)
        self._place = (self.size if base is None else base) + offset
        return self._place

    def read(self, count: int = -1, /) -> bytes:
        """Return the next `count` bytes, fewer at the file's end."""
        first = self._place
        last = self.size if count < 0 else min(self.size, first + count)
        if last <= first:
            return b""
        part = next((each for each in self._parts if each.first <= first and last <= each.last), None)
        if part is None:
            part = self._get(Span(first, min(self.size, max(last, first + _LEAST_BYTES))))
            self._keep(part)
        self._place = last
        return part.data[first - part.first : last - part.first]

    def _keep(self, part: Part) -> None:
        if self.file.size >= 0 and part.size != self.file.size:
            raise changed_file(self.file.path, difference_of(self.file, part.size, part.mark))
        if self.file.size < 0:
            self.file = replace(self.file, size=part.size)
        if not self.file.mark:
            self.file = replace(self.file, mark=part.mark)  # further ranges must be of the same content
        self._parts.append(part)

    def _get(self, span: Span | None) -> Part:
        path, mark = self.file.path, self.file.mark
        try:
            return self._client.flight.call(self._client.url(path), lambda: self._client.fetch(path, span, mark))
        except ChangedFile as error:
            raise changed_file(path, str(error)) from error


def range_header(span: Span | None) -> str:
    """Return the value of HTTP's header `Range` for a span, or for the last `TAIL_BYTES`."""
    return f"bytes=-{TAIL_BYTES}" if span is None else f"bytes={span.first}-{span.last - 1}"


def content_range(text: str) -> tuple[int, int]:
    """Return the first byte and the file's size of a `Content-Range`, as "bytes 0-9/100"."""
    span, _, size = text.removeprefix("bytes ").partition("/")
    return int(span.split("-")[0]), int(size)


def changed_file(path: str, difference: str) -> SourceError:
    """Return the error for a file that is no longer the one that was listed."""
    advice = "open the data again, and write new data to new files"
    return SourceError(path, f"has changed while it was being read ({difference}); {advice}")


def difference_of(was: File, size: int, mark: str) -> str:
    """Return the size and mark of a file, then and now, for `changed_file`."""
    return f"{was.size} bytes, {was.mark}, are now {size} bytes, {mark}"


def coalesce(spans: Iterable[Span], hole: int = _HOLE_BYTES) -> Sequence[Span]:
    """Return spans that hold all of these: those with less than `hole` bytes between them become one.

    Spans without bytes are left out: no request has a way to ask for them."""
    made: list[Span] = []
    for span in sorted((each for each in spans if each.first < each.last), key=lambda each: each.first):
        if made and span.first - made[-1].last <= hole:
            made[-1] = Span(made[-1].first, max(made[-1].last, span.last))
        else:
            made.append(span)
    return made
