"""Ranges of files on web servers, by the session of fsspec's file system and with its options."""

import time
from asyncio import timeout
from functools import partial
from typing import Any

from aiohttp import ClientTimeout
from fsspec.asyn import sync
from fsspec.implementations.http import HTTPFileSystem

from farandole.data.formats.row_groups import File
from farandole.data.stores.connections import LEAST_PER_SECOND
from farandole.data.stores.flight import Flight, PassingFailure
from farandole.data.stores.ranges import ChangedFile, Part, Span, content_range, header_of, range_header

__all__ = ["WebClient"]

_PASSING = {408, 425, 429, 500, 502, 503, 504}
_BUSY = {429, 503}
# Seconds for the head of an answer, and for each piece of its body. A body that takes longer in all must have
# `LEAST_PER_SECOND`.
_TIMEOUT = 60.0


class WebClient:
    """Access to web servers. A server that does not support ranges sends whole files."""

    def __init__(self, fs: HTTPFileSystem) -> None:
        self._fs = fs
        self.flight = Flight()

    def url(self, path: str) -> str:
        """Return the path, which is the URL."""
        return path

    def fetch(self, path: str, span: Span | None, mark: str) -> Part:
        """See `RangeClient.fetch`."""
        # A weak ETag or a modification time is compared with the answer's, below.
        condition = {"If-Match": mark} if mark.startswith('"') else {}
        status, headers, body = self._request("GET", path, {"Range": range_header(span), **condition})
        if status not in (200, 206, 412, 416):  # other answers do not have the file's mark
            raise OSError(f"status {status}")
        found = _mark(headers)
        if status == 412 or (mark and found != mark):
            raise ChangedFile(f"its mark {mark} is now {found or 'another'}")
        if status == 206:
            first, size = content_range(header_of(headers, "Content-Range"))
        elif status == 416 and span is None:  # the last bytes of an empty file
            return Part(0, b"", 0, found)
        elif status == 200:
            first, size = 0, len(body)
        else:
            raise OSError(f"status {status}")
        return Part(first, body, size, found)

    def listing(self, prefix: str, most_pages: int | None) -> list[File] | None:
        """Return None: web servers have no listings."""
        return None

    def first_page(self, prefix: str) -> list[File]:
        """Return []: web servers have no listings."""
        return []

    def look(self, path: str) -> File:
        """See `RangeClient.look`. Requests the first byte, because some servers do not support HEAD."""
        part = self.fetch(path, Span(0, 1), "")
        return File(path, part.size, part.mark)

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, Any, bytes]:
        try:
            ask = partial(_ask, self._fs, self.flight, method, path, headers)
            status, found, body = sync(self._fs.loop, ask)
        except FileNotFoundError:
            raise
        except Exception as error:  # aiohttp's classes: no server, a broken connection, or a timeout
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
    if "timeout" not in fs.client_kwargs:
        options.setdefault("timeout", ClientTimeout(total=None))  # aiohttp's own is 300 s for the whole answer
    # Ranges must be of the file's bytes, not of a compressed body.
    own = {**options.pop("headers", {}), "Accept-Encoding": "identity", **headers}
    async with timeout(_TIMEOUT) as deadline:
        first = fs.loop.time()
        async with session.request(method, fs.encode_url(path), headers=own, **options) as answer:
            flight.answered(began)
            body = bytearray()
            async for piece in answer.content.iter_any():
                body += piece
                latest = first + _TIMEOUT + len(body) / LEAST_PER_SECOND
                deadline.reschedule(min(fs.loop.time() + _TIMEOUT, latest))
            return answer.status, answer.headers, bytes(body)


def _mark(headers: Any) -> str:
    return str(headers.get("ETag") or headers.get("Last-Modified") or "")
