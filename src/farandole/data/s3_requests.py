"""GET requests of S3, signed and sent by botocore's parts: its client takes three times the processor time for each."""

import re
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

__all__ = ["Answer", "S3Requests"]

_GLOBAL = "s3.amazonaws.com/"
_CODE = re.compile(rb"<Code>(\w+)</Code>")


class Answer:
    """The head of an answer; its body is still to be read."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self.status: int = response.status_code
        self.headers: Mapping[str, str] = response.headers

    def body(self) -> bytes:
        """Read the body; raises errors of urllib3, and `OSError`."""
        return bytes(self._response.raw.read())

    def code(self) -> str:
        """Read the body of an error, and return its code: "SlowDown"; empty if it has none."""
        found = _CODE.search(self.body())
        return found[1].decode() if found else ""


class S3Requests:
    """Requests for objects of the buckets to which a client of botocore leads; used from any thread.

    `credentials` are botocore's, which renew themselves; None: requests are not signed.
    `bundle` is a file of certificates to trust."""

    def __init__(
        self, client: Any, credentials: Any, *, bundle: str | None, timeout: tuple[float, float], connections: int
    ) -> None:
        from botocore.httpsession import URLLib3Session
        from botocore.utils import get_environ_proxies

        self._client, self._credentials = client, credentials
        self._region = client.meta.region_name
        proxies = get_environ_proxies(client.meta.endpoint_url)
        self._session = URLLib3Session(
            verify=bundle or True, proxies=proxies, timeout=timeout, max_pool_connections=connections
        )
        self._begins: dict[str, str | None] = {}  # URLs of buckets; None for those that need the client
        self._lock = threading.Lock()

    def get(self, bucket: str, key: str, headers: Mapping[str, str]) -> Answer | None:
        """Ask for an object; None if only the client knows how to. Blocks until the head of the answer is there.

        Raises botocore's errors of connections and credentials."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        begin = self._begin(bucket)
        if begin is None:
            return None
        request = AWSRequest(method="GET", url=begin + quote(key, safe="/~"), headers=dict(headers))
        request.stream_output = True
        if self._credentials is not None:
            S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", self._region).add_auth(request)
        return Answer(self._session.send(request.prepare()))

    def leave(self, bucket: str) -> None:
        """Leave this bucket to the client from now on: its answers need more than a signature."""
        self._begins[bucket] = None

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def _begin(self, bucket: str) -> str | None:
        """Return the URL of a bucket's objects, up to their keys, as the client would make it."""
        with self._lock:
            if bucket not in self._begins:
                # Access points and directory buckets are signed in other ways.
                plain = ":" not in bucket and not bucket.endswith("--x-s3")
                asked = {"Bucket": bucket, "Key": "KEY"}
                made = self._client.generate_presigned_url("get_object", Params=asked) if plain else ""
                # URLs to give away lead to the global endpoint, which sends requests on to the region.
                own = urlsplit(self._client.meta.endpoint_url).netloc
                url = made.partition("?")[0].replace(_GLOBAL, f"{own}/", 1)
                self._begins[bucket] = url.removesuffix("KEY") if url.endswith("/KEY") else None
            return self._begins[bucket]
