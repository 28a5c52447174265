"""Clients that read ranges of remote files, one kind per store."""

import logging
from collections.abc import Mapping
from urllib.parse import urlsplit

import fsspec

from farandole.data.stores.azure_client import AzureClient
from farandole.data.stores.gs_client import GsClient
from farandole.data.stores.ranges import RangeClient
from farandole.data.stores.s3_client import S3Client
from farandole.data.stores.web_client import WebClient
from farandole.data.tables.marks import is_web
from farandole.masking import mask, secret_values

log = logging.getLogger(__name__)


def make_client(
    url: str, options: Mapping[str, object], fs: fsspec.AbstractFileSystem, *, warn: bool
) -> RangeClient | None:
    """Return a client for the store of a URL; None for a store that is read through fsspec's file system alone.

    With `warn`, logs a warning if this kind of store has a client, but the client cannot be made."""
    if is_web(fs):
        return WebClient(fs)
    package = type(fs).__module__.partition(".")[0]
    if package == "gcsfs":
        return GsClient(fs)
    if package == "adlfs":
        return AzureClient(fs)
    if urlsplit(url).scheme in ("s3", "s3a"):
        try:
            return S3Client(url, options)
        except (ImportError, ValueError) as lacking:
            if warn:
                log.warning(
                    "%s is read by %s, which makes several times as many requests, as the client of farandole[s3] "
                    "cannot be made: %s",
                    mask(url),
                    type(fs).__name__,
                    mask(str(lacking), *secret_values(options)),
                )
    return None
