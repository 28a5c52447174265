"""Ranges of files on web servers, by the session of fsspec's file system and with its options."""

import time
from asyncio import timeout
from functools import partial
from typing import TYPE_CHECKING

from fsspec.asyn import sync

from farandole.data.formats.row_groups import File
from farandole.data.stores.connections import LEAST_PER_SECOND
from farandole.data.stores.ranges import Part, RangeClient, Span
from farandole.data.stores.request_limiter import PassingFailure, RequestLimiter
from farandole.data.stores.responses import Response, range_header

if TYPE_CHECKING:
    from fsspec.implementations.http import HTTPFileSystem

# Seconds for the head of an answer, and for each piece of its body. A body that takes longer in all must have
# `LEAST_PER_SECOND`.
_TIMEOUT = 60.0


class WebClient(RangeClient):
    """Access to web servers. A server that does not support ranges sends whole files."""

    def __init__(self, fs: "HTTPFileSystem") -> None:
        self._fs = fs
        self.limiter = RequestLimiter()

    def url(self, path: str) -> str:
        """Return the path, which is the URL."""
        return path

    def fetch(self, path: str, span: Span | None, mark: str) -> Part:
        """See `RangeClient.fetch`."""
        # A weak ETag or a modification time is compared with that of the response.
        condition = {"If-Match": mark} if mark.startswith('"') else {}
        headers = {"Range": range_header(span), **condition}
        try:
            response: Response = sync(self._fs.loop, partial(_ask, self._fs, self.limiter, path, headers))
        except FileNotFoundError:
            raise
        except Exception as error:  # aiohttp's classes: no server, a broken connection, or a timeout
            raise PassingFailure.of(error) from error
        found = response.headers.get("etag") or response.headers.get("last-modified") or ""
        return response.part(path, span, mark, found)

    def page(self, prefix: str, more: str) -> tuple[list[File], str]:
        """Return an empty page: web servers have no listings."""
        return [], ""

    def listing(self, prefix: str, most_pages: int | None) -> list[File] | None:
        """Return None: web servers have no listings."""
        return None

    def look(self, path: str) -> File:
        """See `RangeClient.look`. Requests the first byte, because some servers do not support HEAD."""
        part = self.fetch(path, Span(0, 1), "")
        return File(path, part.size, part.mark)


async def _ask(fs: "HTTPFileSystem", limiter: RequestLimiter, path: str, headers: dict[str, str]) -> Response:
    from aiohttp import ClientTimeout

    session, began = await fs.set_session(), time.monotonic()
    options = dict(fs.kwargs)
    if "timeout" not in fs.client_kwargs:
        options.setdefault("timeout", ClientTimeout(total=None))  # aiohttp's own is 300 s for the whole answer
    # Ranges must be of the file's bytes, not of a compressed body.
    own = {**options.pop("headers", {}), "Accept-Encoding": "identity", **headers}
    async with timeout(_TIMEOUT) as deadline:
        first = fs.loop.time()
        async with session.get(fs.encode_url(path), headers=own, **options) as answer:
            limiter.answered(began)
            body = bytearray()
            async for piece in answer.content.iter_any():
                body += piece
                latest = first + _TIMEOUT + len(body) / LEAST_PER_SECOND
                deadline.reschedule(min(fs.loop.time() + _TIMEOUT, latest))
            received = {name.lower(): value for name, value in answer.headers.items()}
            return Response(answer.status, received, bytes(body))
