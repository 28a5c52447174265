"""Signatures of GET requests of S3 (AWS Signature Version 4)."""

import hashlib
import hmac
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

_METHOD = "AWS4-HMAC-SHA256"
_EMPTY = hashlib.sha256(b"").hexdigest()


class Credentials(Protocol):
    """Frozen credentials of botocore."""

    access_key: str
    secret_key: str
    token: str | None


def signed(
    credentials: Credentials, region: str, host: str, target: str, headers: Mapping[str, str], now: float
) -> dict[str, str]:
    """Return `headers` of a GET request for `target`, and the headers that sign them.

    `target` is the path as it is sent, and the query, sorted by name and quoted. `now` is in seconds since 1970."""
    path, _, query = target.partition("?")
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    made = {**headers, "X-Amz-Date": stamp, "X-Amz-Content-SHA256": _EMPTY}
    if credentials.token:
        made["X-Amz-Security-Token"] = credentials.token
    values = {**made, "Host": host}
    order, names = _sorted(tuple(values))
    lines = "".join([f"{name}:{' '.join(values[own].split())}\n" for name, own in order])
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    request = hashlib.sha256(f"GET\n{path}\n{query}\n{lines}\n{names}\n{_EMPTY}".encode()).hexdigest()
    key = _key(credentials.secret_key, stamp[:8], region)
    signature = hmac.digest(key, f"{_METHOD}\n{stamp}\n{scope}\n{request}".encode(), "sha256").hex()
    account = f"{credentials.access_key}/{scope}"
    made["Authorization"] = f"{_METHOD} Credential={account}, SignedHeaders={names}, Signature={signature}"
    return made


@lru_cache(maxsize=16)
def _sorted(names: tuple[str, ...]) -> tuple[list[tuple[str, str]], str]:
    """Return pairs of each header's lower-case name and its name as given, sorted, and the lower-case names joined."""
    order = sorted((name.lower(), name) for name in names)
    return order, ";".join(name for name, _ in order)


@lru_cache(maxsize=8)
def _key(secret: str, day: str, region: str) -> bytes:
    """Return the key that signs the requests of a day."""
    key = f"AWS4{secret}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key
