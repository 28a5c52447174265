"""Ranges of objects in S3, by botocore's client, which renews credentials; takes options of fsspec and Arrow."""

import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from farandole.data.formats.row_groups import File
from farandole.data.stores.flight import MOST_IN_FLIGHT, Flight, PassingFailure
from farandole.data.stores.options import botocore_options
from farandole.data.stores.ranges import ChangedFile, PagedStore, Part, Span, content_range, header_of, range_header
from farandole.data.stores.s3_listing import Page, page_of
from farandole.data.stores.s3_requests import S3Requests

__all__ = ["S3Client"]

_PASSING = {408, 429, 500, 502, 503, 504}
_BUSY = {429, 503}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "RequestTimeTooSkewed"}
_CODE = re.compile(rb"<Code>(\w+)</Code>")
_VARIABLES = {"bundle": (None, "REQUESTS_CA_BUNDLE", None, None)}  # botocore's client uses it, too
_CONNECT_TIMEOUT, _READ_TIMEOUT = 10, 30  # seconds


class S3Client(PagedStore):
    """Access to buckets of one account, with the options of a URL and of its file system.

    Raises `ImportError` without botocore, `ValueError` for options that botocore does not have."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        import botocore.session  # noqa: F401 - fails now, not at the first request

        self._url, self._options = url, dict(options)
        self._scheme = urlsplit(url).scheme
        self._asked = botocore_options(url, options)
        self.flight = Flight()
        self._lock = threading.Lock()
        self._made: tuple[Any, S3Requests] | None = None
        self._close_made: Callable[[], object] = lambda: None  # at the latest when this client is not used any more

    def __reduce__(self) -> tuple[type["S3Client"], tuple[str, dict[str, object]]]:
        return type(self), (self._url, self._options)

    def url(self, path: str) -> str:
        """Return the URL of "bucket/key"."""
        return f"{self._scheme}://{path}"

    def fetch(self, path: str, span: Span | None, mark: str) -> Part:
        """See `RangeClient.fetch`."""
        bucket, _, key = path.partition("/")
        asked = range_header(span)
        condition = {"IfMatch": mark} if mark.startswith('"') else {}
        found = self._get(path, bucket, key, asked, mark if condition else "")
        if found is None:
            answer = self._ask("get_object", path, Bucket=bucket, Key=key, Range=asked, **condition)
            if answer is not None:
                found = header_of(answer, "ETag"), answer.get("ContentRange"), self._body(answer["Body"].read)
        if found is None:  # the last bytes of an empty object
            return Part(0, b"", 0, mark)
        own, content_span, body = found
        if condition and own != mark:
            raise ChangedFile(f"its mark {mark} is now {own}")
        first, size = (0, len(body)) if content_span is None else content_range(content_span)
        return Part(first, body, size, own)

    def _get(self, path: str, bucket: str, key: str, asked: str, mark: str) -> tuple[str, str | None, bytes] | None:
        """Return mark, range and body of an answer; None if botocore's client must send the request."""
        requests, began = self._connected()[1], time.monotonic()
        headers = {"Range": asked, "User-Agent": "farandole"} | ({"If-Match": mark} if mark else {})
        try:
            answer = requests.get(bucket, key, headers)
            if answer is None:
                return None
            self.flight.answered(began)
            body = answer.body()
        except OSError as error:
            raise PassingFailure(f"{type(error).__name__}: {error}") from error
        if answer.status in (200, 206):
            span = header_of(answer.headers, "content-range") if answer.status == 206 else None
            return header_of(answer.headers, "etag"), span, body
        found = _CODE.search(body)
        code = found[1].decode() if found else ""
        if answer.status == 404:
            raise FileNotFoundError(path)
        if answer.status == 412:
            raise ChangedFile(f"its mark is no longer {mark}")
        if code in _EXPIRED:
            self._forget(requests)
        if code in _EXPIRED or answer.status in _PASSING:
            raise PassingFailure(f"status {answer.status} ({code})", busy=answer.status in _BUSY)
        if answer.status != 416:
            requests.leave(bucket)  # botocore's client finds the bucket's region, or raises an error that explains
        return None

    def page(self, prefix: str, more: str) -> tuple[list[File], str]:
        """See `PagedStore.page`."""
        bucket, _, inner = prefix.partition("/")
        asked = {"Prefix": inner} | ({"ContinuationToken": more} if more else {})

        def ask() -> Page:
            return self._own_page(bucket, asked) or self._clients_page(prefix, bucket, asked)

        found, next_page = self.flight.call(self.url(prefix), ask)
        return [File(f"{bucket}/{key}", size, mark) for key, size, mark in found], next_page

    def _own_page(self, bucket: str, asked: Mapping[str, str]) -> Page | None:
        """Return a page; None if botocore's client must send the request, also because its errors explain more."""
        requests, began = self._connected()[1], time.monotonic()
        names = {"Prefix": "prefix", "ContinuationToken": "continuation-token"}
        query = {names[name]: value for name, value in asked.items()}
        try:
            answer = requests.listing(bucket, {"list-type": "2", "encoding-type": "url", **query})
            if answer is None:
                return None
            self.flight.answered(began)
            body = answer.body()
        except OSError as error:
            raise PassingFailure(f"{type(error).__name__}: {error}") from error
        return page_of(body) if answer.status == 200 else None

    def _clients_page(self, prefix: str, bucket: str, asked: Mapping[str, str]) -> Page:
        answer = self._ask("list_objects_v2", prefix, Bucket=bucket, **asked)
        assert answer is not None, "a listing has no range"
        found = [(str(each["Key"]), int(each["Size"]), header_of(each, "ETag")) for each in answer.get("Contents", ())]
        return found, str(answer["NextContinuationToken"]) if answer.get("IsTruncated") else ""

    def look(self, path: str) -> File:
        """See `RangeClient.look`."""
        bucket, _, key = path.partition("/")
        answer = self._ask("head_object", path, Bucket=bucket, Key=key)
        assert answer is not None, "a head has no range"
        return File(path, int(answer["ContentLength"]), header_of(answer, "ETag"))

    def _ask(self, operation: str, path: str, **arguments: str) -> Mapping[str, Any] | None:
        """Return the answer, None for an empty object's last bytes; raises as `RangeClient.fetch`, and `OSError`."""
        from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

        client, began = self._client(), time.monotonic()
        try:
            answer: Mapping[str, Any] = getattr(client, operation)(**arguments)
            self.flight.answered(began)
            return answer
        except ClientError as error:
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            code = str(error.response.get("Error", {}).get("Code", ""))
            if status == 404:
                raise FileNotFoundError(path) from error
            if status == 412:
                raise ChangedFile(f"its mark is no longer {arguments.get('IfMatch')}") from error
            if status == 416 and "Range" in arguments and arguments["Range"].startswith("bytes=-"):
                return None
            if code in _EXPIRED:
                self._forget(client)
                raise PassingFailure(f"status {status} ({code})") from error
            if status in _PASSING:
                raise PassingFailure(f"status {status} ({code})", busy=status in _BUSY) from error
            raise OSError(f"status {status} ({code}): {error}") from error
        except (HTTPClientError, ConnectionError) as error:
            raise PassingFailure(f"{type(error).__name__}: {error}") from error

    def _body(self, read: Callable[[], bytes]) -> bytes:
        from botocore.exceptions import HTTPClientError, IncompleteReadError
        from urllib3.exceptions import HTTPError

        try:
            return bytes(read())
        except (HTTPClientError, IncompleteReadError, HTTPError, OSError) as error:
            raise PassingFailure(f"{type(error).__name__}: {error}") from error

    def _client(self) -> Any:
        return self._connected()[0]

    def _connected(self) -> tuple[Any, S3Requests]:
        """Return the client and the requests. One thread makes them: botocore's creation is not thread-safe."""
        made = self._made
        return made if made is not None else self._connect()

    def _connect(self) -> tuple[Any, S3Requests]:
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
                    # `Flight` repeats requests.
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
                )
                self._made = made = client, requests
                self._close_made = weakref.finalize(self, _close, *made)
            return self._made

    def _forget(self, used: Any) -> None:
        """Close `used`, so that the next request makes a new client, which reads the credentials anew."""
        with self._lock:
            if self._made is not None and used in self._made:
                self._made = None
                self._close_made()  # requests that are running still get their answers


def _close(client: Any, requests: S3Requests) -> None:
    client.close()
    requests.close()
