"""Ranges of objects in S3, by botocore's client, which renews credentials; takes options of fsspec and Arrow."""

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from farandole.data.formats.row_groups import File
from farandole.data.stores.options import botocore_options
from farandole.data.stores.ranges import Part, RangeClient, Span
from farandole.data.stores.request_limiter import MOST_IN_FLIGHT, PassingFailure, RequestLimiter
from farandole.data.stores.responses import Response, header_of, range_header
from farandole.data.stores.s3_listing import Page, page_of
from farandole.data.stores.s3_requests import S3Requests

if TYPE_CHECKING:
    from botocore.client import BaseClient

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "RequestTimeTooSkewed"}
_VARIABLES = {"bundle": (None, "REQUESTS_CA_BUNDLE", None, None)}  # botocore's client uses it, too
_CONNECT_TIMEOUT, _READ_TIMEOUT = 10, 30  # seconds


Found: TypeAlias = Mapping[str, Any]  # what botocore finds in a response


class S3Client(RangeClient):
    """Access to buckets of one account, with the options of a URL and of its file system.

    Raises `ImportError` without botocore, `ValueError` for options that botocore does not have."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        import botocore.session  # noqa: F401 - fails now, not at the first request

        self._url, self._options = url, dict(options)
        self.scheme = urlsplit(url).scheme
        self._asked = botocore_options(url, options)
        self.limiter = RequestLimiter()
        self._lock = threading.Lock()
        self._made: tuple[BaseClient, S3Requests] | None = None
        self._close_made: Callable[[], object] = lambda: None  # at the latest when this client is not used any more

    def __reduce__(self) -> tuple[type["S3Client"], tuple[str, dict[str, object]]]:
        return type(self), (self._url, self._options)

    def fetch(self, path: str, span: Span | None, mark: str) -> Part:
        """See `RangeClient.fetch`."""
        bucket, _, key = path.partition("/")
        mark = mark if mark.startswith('"') else ""
        headers = {"Range": range_header(span), "User-Agent": "farandole"} | ({"If-Match": mark} if mark else {})
        requests = self._connected()[1]
        response = self._explained(requests, requests.get(bucket, key, headers))
        if response is None:
            requests.leave(bucket)  # botocore's client finds the bucket's region, or raises an error that explains
            condition = {"IfMatch": mark} if mark else {}
            response, _ = self._ask("get_object", Bucket=bucket, Key=key, Range=headers["Range"], **condition)
        own = header_of(response.headers, "etag") if response.status in (200, 206) else mark
        return response.part(path, span, mark, own)

    def page(self, prefix: str, more: str) -> tuple[list[File], str]:
        """See `RangeClient.page`."""
        bucket, _, inner = prefix.partition("/")

        def ask() -> Page:
            requests = self._connected()[1]
            token = {"continuation-token": more} if more else {}
            query = {"list-type": "2", "encoding-type": "url", "prefix": inner, **token}
            response = self._explained(requests, requests.listing(bucket, query))
            if response is not None:
                response.check(prefix)
                return page_of(response.body)
            token = {"ContinuationToken": more} if more else {}
            response, found = self._ask("list_objects_v2", Bucket=bucket, Prefix=inner, **token)
            response.check(prefix)
            items = [
                (str(each["Key"]), int(each["Size"]), header_of(each, "ETag")) for each in found.get("Contents", ())
            ]
            return items, str(found["NextContinuationToken"]) if found.get("IsTruncated") else ""

        items, next_page = self.limiter.call(self.url(prefix), ask)
        return [File(f"{bucket}/{key}", size, mark) for key, size, mark in items], next_page

    def look(self, path: str) -> File:
        """See `RangeClient.look`."""
        bucket, _, key = path.partition("/")
        response, _ = self._ask("head_object", Bucket=bucket, Key=key)
        response.check(path)
        return File(path, int(header_of(response.headers, "content-length")), header_of(response.headers, "etag"))

    def _explained(self, used: object, response: Response | None) -> Response | None:
        """Return a response unless it is an error that only botocore's client explains.

        Raises `PassingFailure` for expired credentials, after closing `used`, which has sent the request."""
        if response is None or response.has_meaning:
            return response
        if response.code in _EXPIRED:
            self._forget(used)
            raise PassingFailure(f"status {response.status} ({response.code})")
        return None

    def _ask(self, operation: str, **arguments: str) -> tuple[Response, Found]:
        """Return the response to a request of botocore's client, and what the client has found in it.

        Raises `PassingFailure`, and `OSError` for an error without a meaning for `Response`."""
        from botocore.exceptions import ClientError, ConnectionError, HTTPClientError, IncompleteReadError
        from urllib3.exceptions import HTTPError

        client, began = self._connected()[0], time.monotonic()
        try:
            found: Found = getattr(client, operation)(**arguments)
            self.limiter.answered(began)
            return _response(found, found["Body"].read() if "Body" in found else b""), found
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            response = _response(error.response, f"<Code>{code}</Code>".encode())
            if self._explained(client, response) is None:
                raise OSError(f"status {response.status} ({code}): {error}") from error
            return response, {}
        except (HTTPClientError, ConnectionError, IncompleteReadError, HTTPError, OSError) as error:
            raise PassingFailure.of(error) from error

    def _connected(self) -> tuple["BaseClient", S3Requests]:
        """Return the client and the requests. One thread makes them: botocore's creation is not thread-safe."""
        made = self._made
        if made is not None:
            return made
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config

        with self._lock:
            if self._made is None:
                asked = dict(self._asked)
                session = botocore.session.Session(_VARIABLES, profile=asked.pop("profile", None))
                endpoint = asked.get("endpoint_url") or session.get_config_variable("endpoint_url")
                anonymous = asked.pop("anonymous", None)
                config = Config(
                    signature_version=UNSIGNED if anonymous else None,
                    # `RequestLimiter` repeats requests.
                    retries={"total_max_attempts": 1},
                    max_pool_connections=MOST_IN_FLIGHT,
                    connect_timeout=_CONNECT_TIMEOUT,
                    read_timeout=_READ_TIMEOUT,
                    s3={"addressing_style": "path"} if endpoint else None,
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                )
                client = session.create_client("s3", config=config, **asked)
                given = [asked.get(f"aws_{name}") for name in ("access_key_id", "secret_access_key", "session_token")]
                if given[0]:
                    session.set_credentials(*given)
                verify = asked.get("verify", True)
                if verify is True:
                    verify = session.get_config_variable("ca_bundle") or session.get_config_variable("bundle")
                assert verify is None or isinstance(verify, str | bool), "see botocore_options"
                requests = S3Requests(
                    client,
                    None if anonymous else session.get_credentials(),
                    bundle=verify,
                    timeout=(_CONNECT_TIMEOUT, _READ_TIMEOUT),
                    connections=MOST_IN_FLIGHT,
                    answered=self.limiter.answered,
                )
                self._made = made = client, requests
                self._close_made = weakref.finalize(self, _close, *made)
            return self._made

    def _forget(self, used: object) -> None:
        """Close `used`, so that the next request makes a new client, which reads the credentials anew."""
        with self._lock:
            if self._made is not None and any(used is each for each in self._made):
                self._made = None
                self._close_made()  # requests that are running still get their answers


def _response(found: Found, body: bytes) -> Response:
    """Return the response that botocore describes in its results and errors."""
    head = found.get("ResponseMetadata", {})
    return Response(int(head.get("HTTPStatusCode", 0)), head.get("HTTPHeaders", {}), body)


def _close(client: "BaseClient", requests: S3Requests) -> None:
    client.close()
    requests.close()
