"""GET requests to S3 with botocore's credentials and endpoints, for a tenth of its client's processor time."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from farandole.data.stores.connections import Connections
from farandole.data.stores.request_limiter import PassingFailure
from farandole.data.stores.responses import Response
from farandole.data.stores.s3_signing import signed

if TYPE_CHECKING:
    from botocore.client import BaseClient
    from botocore.credentials import RefreshableCredentials

_GLOBAL = "s3.amazonaws.com/"


class S3Requests:
    """GET requests to the store of a botocore client, from any thread.

    `credentials` are botocore's, which renew themselves; with None, requests are not signed. `bundle` is a file of
    certificates to trust; None or True: botocore's; False: certificates are not verified. `answered` is that of
    `RequestLimiter`. If the environment names a proxy for the store, all requests are left to the client."""

    def __init__(
        self,
        client: "BaseClient",
        credentials: "RefreshableCredentials | None",
        *,
        bundle: str | bool | None,
        timeout: tuple[float, float],
        connections: int,
        answered: Callable[[float], None],
    ) -> None:
        from botocore.httpsession import get_cert_path
        from botocore.utils import get_environ_proxies

        self._client, self._credentials, self._answered = client, credentials, answered
        self._region = client.meta.region_name
        self._by_proxy = bool(get_environ_proxies(client.meta.endpoint_url))
        trusted = None if bundle is False else get_cert_path(bundle or True)
        self._connections = Connections(bundle=trusted, timeout=timeout, most=connections)
        self._begins: dict[str, str | None] = {}  # URLs of buckets; None: left to the client
        self._lock = threading.Lock()

    def get(self, bucket: str, key: str, headers: Mapping[str, str]) -> Response | None:
        """Request an object; return None if only the client can. Blocks until the response has arrived.

        Raises `PassingFailure`, and botocore's errors about credentials."""
        return self._send(bucket, quote(key, safe="/~"), "", headers)

    def listing(self, bucket: str, query: Mapping[str, str]) -> Response | None:
        """Request a page of a listing; returns, blocks and raises as `get`."""
        query_text = "&".join(f"{quote(name, safe='')}={quote(query[name], safe='')}" for name in sorted(query))
        return self._send(bucket, "", f"?{query_text}", {"User-Agent": "farandole"})

    def _send(self, bucket: str, key: str, query: str, headers: Mapping[str, str]) -> Response | None:
        begin = self._begin(bucket)
        if begin is None:
            return None
        scheme, _, rest = begin.partition("://")
        host, _, inner = rest.partition("/")
        target, began = f"/{inner}{key}{query}", time.monotonic()
        if self._credentials is not None:
            frozen = self._credentials.get_frozen_credentials()
            headers = signed(frozen, self._region, host, target, headers, time.time())
        try:
            return self._connections.get(f"{scheme}://{host}", target, headers, lambda: self._answered(began))
        except OSError as error:
            raise PassingFailure.of(error) from error

    def leave(self, bucket: str) -> None:
        """Leave this bucket to the client from now on, because its requests need more than a signature."""
        self._begins[bucket] = None

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    def _begin(self, bucket: str) -> str | None:
        """Return the start of the URLs of a bucket's objects, before the key; None if the bucket needs the client."""
        with self._lock:
            if bucket not in self._begins:
                # Requests to access points and directory buckets are signed differently.
                plain = not self._by_proxy and ":" not in bucket and not bucket.endswith("--x-s3")
                asked = {"Bucket": bucket, "Key": "KEY"}
                made = self._client.generate_presigned_url("get_object", Params=asked) if plain else ""
                # Presigned URLs name the global endpoint, which redirects to the region's.
                own = urlsplit(self._client.meta.endpoint_url).netloc
                url = made.partition("?")[0].replace(_GLOBAL, f"{own}/", 1)
                self._begins[bucket] = url.removesuffix("KEY") if url.endswith("/KEY") else None
            return self._begins[bucket]
