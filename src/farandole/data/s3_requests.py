"""GET requests of S3 with botocore's credentials and places: its client takes ten times the processor time for each."""

import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from farandole.data.connections import Answer, Connections
from farandole.data.s3_signing import signed

__all__ = ["S3Requests"]

_GLOBAL = "s3.amazonaws.com/"


class S3Requests:
    """Requests for objects of the buckets to which a client of botocore leads; used from any thread.

    `credentials` are botocore's, which renew themselves; None: requests are not signed. `bundle` is a file of
    certificates to trust; None or True: botocore's; False: any certificate will do. Where a proxy leads to the store,
    all requests are left to the client."""

    def __init__(
        self,
        client: Any,
        credentials: Any,
        *,
        bundle: str | bool | None,
        timeout: tuple[float, float],
        connections: int,
    ) -> None:
        from botocore.httpsession import get_cert_path
        from botocore.utils import get_environ_proxies

        self._client, self._credentials = client, credentials
        self._region = client.meta.region_name
        self._by_proxy = bool(get_environ_proxies(client.meta.endpoint_url))
        trusted = None if bundle is False else get_cert_path(bundle or True)
        self._connections = Connections(bundle=trusted, timeout=timeout, most=connections)
        self._begins: dict[str, str | None] = {}  # URLs of buckets; None for those that need the client
        self._lock = threading.Lock()

    def get(self, bucket: str, key: str, headers: Mapping[str, str]) -> Answer | None:
        """Ask for an object; None if only the client knows how to. Blocks until the head of the answer is there.

        Raises `OSError`, and botocore's errors of credentials."""
        return self._send(bucket, quote(key, safe="/~"), "", headers)

    def listing(self, bucket: str, query: Mapping[str, str]) -> Answer | None:
        """Ask for a page of a listing; as `get`."""
        query_text = "&".join(f"{quote(name, safe='')}={quote(query[name], safe='')}" for name in sorted(query))
        return self._send(bucket, "", f"?{query_text}", {"User-Agent": "farandole"})

    def _send(self, bucket: str, key: str, query: str, headers: Mapping[str, str]) -> Answer | None:
        begin = self._begin(bucket)
        if begin is None:
            return None
        scheme, _, rest = begin.partition("://")
        host, _, inner = rest.partition("/")
        target = f"/{inner}{key}{query}"
        if self._credentials is not None:
            frozen = self._credentials.get_frozen_credentials()
            headers = signed(frozen, self._region, host, target, headers, time.time())
        return self._connections.get(f"{scheme}://{host}", target, headers)

    def leave(self, bucket: str) -> None:
        """Leave this bucket to the client from now on: its answers need more than a signature."""
        self._begins[bucket] = None

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    def _begin(self, bucket: str) -> str | None:
        """Return the URL of a bucket's objects, up to their keys, as the client would make it."""
        with self._lock:
            if bucket not in self._begins:
                # Access points and directory buckets are signed in other ways.
                plain = not self._by_proxy and ":" not in bucket and not bucket.endswith("--x-s3")
                asked = {"Bucket": bucket, "Key": "KEY"}
                made = self._client.generate_presigned_url("get_object", Params=asked) if plain else ""
                # URLs to give away lead to the global endpoint, which sends requests on to the region.
                own = urlsplit(self._client.meta.endpoint_url).netloc
                url = made.partition("?")[0].replace(_GLOBAL, f"{own}/", 1)
                self._begins[bucket] = url.removesuffix("KEY") if url.endswith("/KEY") else None
            return self._begins[bucket]
