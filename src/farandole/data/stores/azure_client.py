"""Ranges of blobs in Azure's stores, by adlfs's service client, which has the credentials and repeats requests."""

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fsspec.asyn import AsyncFileSystem, sync

from farandole.data.formats.row_groups import File
from farandole.data.stores.ranges import TAIL_BYTES, ChangedFile, Part, RangeClient, Span
from farandole.data.stores.request_limiter import PassingFailure, RequestLimiter
from farandole.data.stores.responses import content_range, header_of

if TYPE_CHECKING:
    from azure.storage.blob.aio import BlobClient

T = TypeVar("T")

_TIMEOUT = 300.0  # seconds for a request, including its repetitions by Azure's client
_ATTEMPTS = 2  # in each, Azure's client sends a request up to four times


class AzureClient(RangeClient):
    """Access to containers. The mark of a blob is its ETag; each read requests the blob with that ETag."""

    scheme = "abfs"

    def __init__(self, fs: AsyncFileSystem) -> None:
        self._fs = fs
        self.limiter = RequestLimiter(attempts=_ATTEMPTS)

    def fetch(self, path: str, span: Span | None, mark: str) -> Part:
        """See `RangeClient.fetch`. A blob's end takes one more request, for its size: Azure has no suffix ranges."""
        from azure.core import MatchConditions

        if span is None:
            now = self.look(path)
            if mark and now.mark != mark:
                raise ChangedFile(f"its mark {mark} is now {now.mark}")
            if not now.size:
                return Part(0, b"", 0, now.mark)
            span, mark = Span(max(0, now.size - TAIL_BYTES), now.size), now.mark
        # Azure's client would pass None on to aiohttp, which refuses it.
        condition: dict[str, Any] = {"etag": mark, "match_condition": MatchConditions.IfNotModified} if mark else {}

        async def ask() -> Part:
            async with self._blob(path) as blob:
                began = time.monotonic()
                answer = await blob.download_blob(span.first, span.last - span.first, **condition)
                self.limiter.answered(began)
                properties = answer.properties
                first, size = content_range(properties.content_range)  # `properties.size` is the size of the range
                return Part(first, bytes(await answer.readall()), size, _mark(properties.etag))

        return self._run(path, ask)

    def look(self, path: str) -> File:
        """See `RangeClient.look`."""

        async def ask() -> File:
            async with self._blob(path) as blob:
                properties = await blob.get_blob_properties()
                return File(path, int(properties.size), _mark(properties.etag))

        return self._run(path, ask)

    def page(self, prefix: str, more: str) -> tuple[list[File], str]:
        """See `RangeClient.page`."""
        container, _, inner = prefix.partition("/")

        async def ask() -> tuple[list[File], str]:
            async with self._fs.service_client.get_container_client(container) as asked:
                pages = asked.list_blobs(name_starts_with=inner).by_page(continuation_token=more or None)
                found = [
                    File(f"{container}/{each.name}", int(each.size), _mark(each.etag))
                    async for each in await anext(pages)
                ]
                return found, str(pages.continuation_token or "")

        return self.limiter.call(self.url(prefix), lambda: self._run(prefix, ask))

    def _blob(self, path: str) -> "BlobClient":
        container, _, name = path.partition("/")
        blob: BlobClient = self._fs.service_client.get_blob_client(container=container, blob=name)
        return blob

    def _run(self, path: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a request; raises as `RangeClient.fetch` does, and Azure's other errors."""
        from azure.core.exceptions import (
            IncompleteReadError,
            ResourceModifiedError,
            ResourceNotFoundError,
            ServiceRequestError,
            ServiceResponseError,
        )

        try:
            done: T = sync(self._fs.loop, ask, timeout=_TIMEOUT)
        except ResourceNotFoundError as error:
            raise FileNotFoundError(path) from error
        except ResourceModifiedError as error:
            raise ChangedFile("its mark is another now") from error
        except (ServiceRequestError, ServiceResponseError, IncompleteReadError, TimeoutError) as error:
            raise PassingFailure.of(error) from error
        return done


def _mark(etag: str | None) -> str:
    """Return an ETag in quotes; listings return ETags without them."""
    etag = header_of({"ETag": etag}, "ETag")
    return f'"{etag.strip(chr(34))}"'
