"""Ranges of remote files: clients that fetch them and check the file's mark, and files made of them."""

import io
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from farandole.data.formats.row_groups import File
from farandole.data.stores.request_limiter import PassingFailure, RequestLimiter
from farandole.errors import SourceError

TAIL_BYTES = 64 << 10  # fetched for a footer; a larger footer takes a second request
# Largest gap between two ranges that are fetched together: its bytes cost less than another request.
_HOLE_BYTES = 1 << 20
_LEAST_BYTES = 64 << 10  # least size of a range that is fetched when it is read
_SMALL_BYTES = 256 << 10  # up to this size, zeroing memory is faster than mapping it


class ChangedFile(Exception):
    """The file no longer has the requested mark."""


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
        """The position after the last byte."""
        return self.first + len(self.data)


class RangeClient(ABC):
    """Access to one store; used from any thread. Can be pickled."""

    scheme: str  # of the store's URLs
    limiter: RequestLimiter

    def url(self, path: str) -> str:
        """Return the URL of a path, for errors."""
        return f"{self.scheme}://{path}"

    @abstractmethod
    def fetch(self, path: str, span: Span | None, mark: str) -> Part:
        """Fetch a span, or with None the last `TAIL_BYTES`; `mark` is the file's expected mark, "" for any.

        The part may lack bytes, which `fetch_whole` requests. Raises `ChangedFile`, `FileNotFoundError`, and
        `PassingFailure` if another attempt may succeed."""

    @abstractmethod
    def look(self, path: str) -> File:
        """Return the current size and mark of a file; raises `FileNotFoundError`, and `PassingFailure`."""

    @abstractmethod
    def page(self, prefix: str, more: str) -> tuple[list[File], str]:
        """Return the page of a listing with token `more` ("": the first page), and the next token, "" after the last.

        Raises as `RequestLimiter.call` does."""

    def listing(self, prefix: str, most_pages: int | None) -> list[File] | None:
        """List all files whose paths begin with `prefix`; None if the store has no listings, or needs more pages."""
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
        """List the first files whose paths begin with `prefix`, as many as one request returns."""
        return self.page(prefix, "")[0]


class RangeFile(io.RawIOBase):
    """A remote file for reading. Ranges that `fetch` has fetched are in memory; others are fetched when they are read.

    All ranges have the same mark: raises `SourceError` if the file changes while it is read."""

    def __init__(self, client: RangeClient, file: File) -> None:
        super().__init__()
        self._client, self.file = client, file
        self._parts: list[Part] = []
        self._place = 0

    def fetch(self, spans: Iterable[Span]) -> None:
        """Fetch these ranges, adjacent ones with one request; blocks until all have arrived."""
        asked = coalesce(spans)
        if len(asked) == 1:
            self._keep(self._get(asked[0]))
        elif asked:
            threads = min(len(asked), self._client.limiter.most)
            with ThreadPoolExecutor(threads, thread_name_prefix="farandole-range") as pool:
                for part in pool.map(self._get, asked):
                    self._keep(part)

    def image(self) -> bytearray | mmap.mmap:
        """Return memory of the file's size with the fetched ranges at their positions, and zeros elsewhere.

        For a large file, pages without fetched bytes take no memory."""
        made: bytearray | mmap.mmap
        if self.size <= _SMALL_BYTES:
            made = bytearray(max(1, self.size))
        else:
            made = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for part in self._parts:
            made[part.first : part.last] = part.data
        return made

    def fetch_tail(self) -> None:
        """Fetch the end of the file, and learn its size and mark from the answer."""
        part = self._get(None)
        self.file = replace(self.file, size=part.size, mark=part.mark)
        self._keep(part)

    @property
    def size(self) -> int:
        """The size of the file in bytes; takes a request if it is unknown."""
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
        """Return the position of the next read."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position of the next read; see `io.IOBase.seek`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place}.get(whence)
        self._place = (self.size if base is None else base) + offset
        return self._place

    def read(self, count: int = -1, /) -> bytes:
        """Return the next `count` bytes (-1: all), fewer at the file's end."""
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
            self.file = replace(self.file, mark=part.mark)  # later ranges must have the same mark
        self._parts.append(part)

    def _get(self, span: Span | None) -> Part:
        path = self.file.path
        try:
            return self._client.limiter.call(self._client.url(path), lambda: fetch_whole(self._client, self.file, span))
        except ChangedFile as error:
            raise changed_file(path, str(error)) from error


def fetch_whole(client: RangeClient, file: File, span: Span | None) -> Part:
    """Fetch a span as `RangeClient.fetch` does, and with further requests the bytes that an answer lacks.

    HTTP allows answers with fewer bytes than requested. Raises `PassingFailure` if an answer brings no missing byte."""
    part = client.fetch(file.path, span, file.mark)
    # With the same mark the file has the same size; a whole body that is shorter has been cut.
    size = max(part.size, file.size) if file.mark and part.mark == file.mark else part.size
    first, last = (part.first, size) if span is None else (span.first, min(size, span.last))
    pieces, end = [part.data], part.last
    while end < last:
        rest = client.fetch(file.path, Span(end, last), part.mark)
        if not rest.first <= end < rest.last:
            break
        pieces.append(rest.data[end - rest.first :])
        end = rest.last
    if part.first > first or end < last:
        came = f"and {end - part.first} from {part.first} on have come"
        raise PassingFailure(f"{last - first} bytes from {first} on were requested, {came}")
    return replace(part, data=b"".join(pieces)) if len(pieces) > 1 else part


def changed_file(path: str, difference: str) -> SourceError:
    """Return the error for a file that has changed since it was listed."""
    advice = "open the data again, and write new data to new files"
    return SourceError(path, f"has changed while it was being read ({difference}); {advice}")


def difference_of(was: File, size: int, mark: str) -> str:
    """Return a text with the old and new size and mark of a file, for `changed_file`."""
    return f"{was.size} bytes, {was.mark}, are now {size} bytes, {mark}"


def coalesce(spans: Iterable[Span], hole: int = _HOLE_BYTES) -> Sequence[Span]:
    """Return spans that cover all of these; spans with at most `hole` bytes between them become one.

    Empty spans are left out: HTTP cannot request them."""
    made: list[Span] = []
    for span in sorted((each for each in spans if each.first < each.last), key=lambda each: each.first):
        if made and span.first - made[-1].last <= hole:
            made[-1] = Span(made[-1].first, max(made[-1].last, span.last))
        else:
            made.append(span)
    return made
