"""Responses of stores over HTTP: the ranges of files in them, and the errors that their statuses mean."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from farandole.data.stores.ranges import TAIL_BYTES, ChangedFile, Part, Span
from farandole.data.stores.request_limiter import PassingFailure

_PASSING = {408, 425, 429, 500, 502, 503, 504}
_BUSY = {429, 503}
_GONE = {404, 410}
_WITH_PARTS = {200, 206, 412, 416}
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)", re.ASCII)
_CODE = re.compile(rb"<Code>(\w+)</Code>")


@dataclass(frozen=True, slots=True)
class Response:
    """Status, headers with names in lower case, and body of a response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """S3's name for the error in the body, "" if there is none."""
        found = _CODE.search(self.body)
        return found[1].decode() if found else ""

    @property
    def has_meaning(self) -> bool:
        """Whether `check` and `part` know what the status means."""
        return self.status in _WITH_PARTS | _GONE | _PASSING

    def check(self, path: str) -> None:
        """Raise `FileNotFoundError`, `PassingFailure` or `OSError` for a status that means an error.

        Accepts statuses 412 and 416, for `part`."""
        status = f"status {self.status} ({self.code})" if self.code else f"status {self.status}"
        if self.status in _GONE:
            raise FileNotFoundError(path)
        if self.status in _PASSING:
            raise PassingFailure(status, busy=self.status in _BUSY)
        if self.status not in _WITH_PARTS:
            raise OSError(status)

    def part(self, path: str, span: Span | None, mark: str, found: str) -> Part:
        """Return the requested part of a file with the mark `found`; raises as `RangeClient.fetch` does."""
        self.check(path)
        if self.status == 412 or (mark and found != mark):
            raise ChangedFile(f"its mark {mark} is now {found if found not in ('', mark) else 'another'}")
        if self.status == 206:
            first, size = content_range(header_of(self.headers, "content-range"))
            return Part(first, self.body, size, found)
        if self.status == 200:
            return Part(0, self.body, len(self.body), found)
        if span is None:  # the last bytes of an empty file
            return Part(0, b"", 0, found)
        raise OSError(f"status {self.status}")


def range_header(span: Span | None) -> str:
    """Return the value of HTTP's header `Range` for a span, or for the last `TAIL_BYTES`."""
    return f"bytes=-{TAIL_BYTES}" if span is None else f"bytes={span.first}-{span.last - 1}"


def content_range(text: str | None) -> tuple[int, int]:
    """Return the first byte's position and the file's size in a `Content-Range` such as "bytes 0-9/100".

    Raises `OSError` for a response without one, or with another form of it."""
    found = _CONTENT_RANGE.match(text or "")
    if found is None:
        raise OSError(f"the answer's header Content-Range is {text!r}, not 'bytes FIRST-LAST/SIZE'")
    return int(found[1]), int(found[2])


def header_of(headers: Mapping[str, str | None], name: str) -> str:
    """Return a header of a response; raises `OSError` if the response does not have it."""
    found = headers.get(name)
    if not found:
        raise OSError(f"the answer has no {name}, which says what it holds; the store, and each proxy, must send it")
    return found
