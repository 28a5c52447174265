"""Ranges of files of web servers, by fsspec's session, with the options that it was made with."""

import time
from functools import partial
from typing import Any

from fsspec.asyn import sync
from fsspec.implementations.http import HTTPFileSystem

from farandole.data.flight import Flight, PassingFailure
from farandole.data.ranges import ChangedFile, Part, Span, content_range, range_header
from farandole.data.row_groups import File

__all__ = ["WebClient"]

_PASSING = {408, 425, 429, 500, 502, 503, 504}
_BUSY = {429, 503}
_TIMEOUT = 60.0  # seconds for a request


class WebClient:
    """Access to web servers. A server that knows no ranges sends whole files."""

    def __init__(self, fs: HTTPFileSystem) -> None:
        self._fs = fs
        self.flight = Flight()

    def url(self, path: str) -> str:
        """Return the path: it is a URL."""
        return path

    def fetch(self, path: str, span: Span | None, mark: str) -> Part:
        """See `RangeClient.fetch`."""
        # Marks of other kinds, weak ones too, are compared with that of the answer.
        condition = {"If-Match": mark} if mark.startswith('"') else {}
        status, headers, body = self._request("GET", path, {"Range": range_header(span), **condition})
        if status not in (200, 206, 412, 416):  # an answer that is not about the file has no mark of it
            raise OSError(f"status {status}")
        found = _mark(headers)
        if status == 412 or (mark and found != mark):
            raise ChangedFile(f"its mark {mark} is now {found or 'another'}")
        if status == 206:
            first, size = content_range(headers["Content-Range"])
        elif status == 416 and span is None:  # of an empty file
            return Part(0, b"", 0, found)
        elif status == 200:
            first, size = 0, len(body)
        else:
            raise OSError(f"status {status}")
        return Part(first, body, size, found).complete(span)

    def listing(self, prefix: str, most_pages: int | None) -> list[File] | None:
        """Return None: servers have no listings."""
        return None

    def first_page(self, prefix: str) -> list[File]:
        """Return nothing: servers have no listings."""
        return []

    def look(self, path: str) -> File:
        """Look at a file by the head of its first byte's range: some servers do not know HEAD."""
        part = self.fetch(path, Span(0, 1), "")
        return File(path, part.size, part.mark)

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, Any, bytes]:
        try:
            ask = partial(_ask, self._fs, self.flight, method, path, headers)
            status, found, body = sync(self._fs.loop, ask, timeout=_TIMEOUT)
        except FileNotFoundError:
            raise
        except Exception as error:  # aiohttp's own: the server is not there, or broke off, or is too slow
            raise PassingFailure(f"{type(error).__name__}: {error}") from error
        if status in (404, 410):
            raise FileNotFoundError(path)
        if status in _PASSING:
            raise PassingFailure(f"status {status}", busy=status in _BUSY)
        return status, found, body


async def _ask(
    fs: HTTPFileSystem, flight: Flight, method: str, path: str, headers: dict[str, str]
) -> tuple[int, Any, bytes]:
    session, began = await fs.set_session(), time.monotonic()
    options = dict(fs.kwargs)
    # Ranges are of the bytes that lie there, not of compressed ones.
    own = {**options.pop("headers", {}), "Accept-Encoding": "identity", **headers}
    async with session.request(method, fs.encode_url(path), headers=own, **options) as answer:
        flight.answered(began)
        return answer.status, answer.headers, await answer.read()


def _mark(headers: Any) -> str:
    return str(headers.get("ETag") or headers.get("Last-Modified") or "")
