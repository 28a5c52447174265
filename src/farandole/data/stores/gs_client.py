"""Ranges of objects in Google Cloud Storage, by gcsfs's session, which has the credentials and repeats requests."""

import json
import time
from collections.abc import Mapping
from urllib.parse import quote

from fsspec.asyn import AsyncFileSystem, sync

from farandole.data.formats.row_groups import File
from farandole.data.stores.ranges import ChangedFile, Part, RangeClient, Span
from farandole.data.stores.request_limiter import PassingFailure, RequestLimiter
from farandole.data.stores.responses import content_range, range_header

_TIMEOUT = 300.0  # seconds for a request, including its repetitions by gcsfs
_ATTEMPTS = 2  # in each, gcsfs sends a request up to six times


class GsClient(RangeClient):
    """Access to buckets. The mark of an object is its generation; each read requests that generation."""

    scheme = "gs"

    def __init__(self, fs: AsyncFileSystem) -> None:
        self._fs = fs
        self.limiter = RequestLimiter(attempts=_ATTEMPTS)

    def fetch(self, path: str, span: Span | None, mark: str) -> Part:
        """See `RangeClient.fetch`."""
        condition = {"ifGenerationMatch": mark} if mark else {}
        try:
            headers, body = self._ask(path, self._fs.url(path), headers={"Range": range_header(span)}, **condition)
        except FileExistsError as error:  # gcsfs raises it for status 412
            raise ChangedFile(f"its generation is no longer {mark}") from error
        except Exception as error:  # gcsfs has an error class of its own
            if span is None and str(getattr(error, "code", "")) == "416":  # the last bytes of an empty object
                return Part(0, b"", 0, mark)
            raise
        found = str(headers.get("x-goog-generation", mark))
        span_text = headers.get("Content-Range")
        first, size = (0, len(body)) if span_text is None else content_range(span_text)
        return Part(first, body, size, found)

    def look(self, path: str) -> File:
        """See `RangeClient.look`."""
        bucket, _, key = path.partition("/")
        _, found = self._ask(path, f"b/{quote(bucket, safe='')}/o/{quote(key, safe='')}")
        return _file(bucket, json.loads(found))

    def page(self, prefix: str, more: str) -> tuple[list[File], str]:
        """See `RangeClient.page`."""
        bucket, _, inner = prefix.partition("/")
        asked = {"prefix": inner, "fields": "items(name,size,generation),nextPageToken"}
        asked |= {"pageToken": more} if more else {}
        _, body = self.limiter.call(
            self.url(prefix), lambda: self._ask(prefix, f"b/{quote(bucket, safe='')}/o", **asked)
        )
        page = json.loads(body)
        return [_file(bucket, each) for each in page.get("items", ())], str(page.get("nextPageToken", ""))

    def _ask(self, path: str, place: str, **asked: object) -> tuple[Mapping[str, str], bytes]:
        """Return headers and body of an answer; raises as `RangeClient.fetch` does, and gcsfs's other errors."""
        from aiohttp import ClientError

        began = time.monotonic()
        try:
            headers, body = sync(self._fs.loop, self._fs._call, "GET", place, timeout=_TIMEOUT, **asked)
        except FileNotFoundError as error:
            raise FileNotFoundError(path) from error
        except (ClientError, TimeoutError) as error:
            raise PassingFailure.of(error) from error
        self.limiter.answered(began)  # includes the body, as gcsfs returns only after it
        return headers, bytes(body)


def _file(bucket: str, item: Mapping[str, str]) -> File:
    return File(f"{bucket}/{item['name']}", int(item["size"]), str(item["generation"]))
