"""Choice of a URL's file system."""

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import fsspec
import pyarrow as pa
import pyarrow.fs
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.local import LocalFileSystem

from farandole.data.formats.places import local_path
from farandole.data.stores.options import arrow_s3_options
from farandole.errors import SourceError
from farandole.masking import hide_cause, mask, secret_values


def is_local(urls: str | Sequence[str], options: Mapping[str, object] | None) -> bool:
    """Return whether the URL, the first of several, is a local path."""
    first = urls if isinstance(urls, str) else next(iter(urls), "")
    return isinstance(open_url(first, options or {})[0], LocalFileSystem)


def open_urls(urls: Sequence[str], options: Mapping[str, object]) -> list[tuple[fsspec.AbstractFileSystem, str]]:
    """Open each URL as `open_url` does; s3 URLs with the same user and query share one client of Arrow.

    Without sharing, each URL would get a file system that differs from the others."""
    stores: dict[tuple[str, str, str], fsspec.AbstractFileSystem] = {}
    made = []
    for url in urls:
        if local_path(url) is not None:
            made.append(open_url(url, options))
            continue
        parts = urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
        store = parts.scheme, user, parts.query
        if store in stores:
            made.append((stores[store], f"{host}{parts.path}".rstrip("/")))
            continue
        fs, place = open_url(url, options)
        if isinstance(fs, ArrowFSWrapper) and parts.scheme in ("s3", "s3a"):
            stores[store] = fs
        made.append((fs, place))
    return made


def open_url(url: str, options: Mapping[str, object]) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a URL, and its path there. Raises `SourceError` if there is none.

    Uses fsspec's file system, or Arrow's (s3, gs, hdfs) if fsspec's package is not installed. Only Arrow's supports an
    s3 URL with credentials or a query."""
    if (path := local_path(url)) is not None:
        return LocalFileSystem(**options), path
    secrets = secret_values(options)
    parts = urlsplit(url)
    if parts.scheme in ("s3", "s3a") and (parts.query or ":" in parts.netloc or "@" in parts.netloc):
        return _open_by_arrow(url, options, "takes no options in a URL")
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as missing:
        if options and parts.scheme not in ("s3", "s3a"):
            raise SourceError(url, f"its file system needs a package for these options: {missing}") from missing
        return _open_by_arrow(url, options, str(missing))
    except Exception as error:  # each file system has error classes of its own
        raise SourceError(url, mask(f"cannot be opened: {error}", *secrets)) from hide_cause(error, *secrets)
    return fs, path


def _open_by_arrow(
    url: str, options: Mapping[str, object], without_fsspec: str
) -> tuple[fsspec.AbstractFileSystem, str]:
    """Open a URL with Arrow's client; `without_fsspec` says in errors why fsspec is not used."""
    secrets, parts = secret_values(options), urlsplit(url)
    try:
        if options and (parts.query or parts.username is not None):
            raise ValueError("the URL has options, too; give them all in one place")
        if options:
            arrow = pyarrow.fs.S3FileSystem(**arrow_s3_options(options))
            path = f"{parts.netloc}{parts.path}".rstrip("/")
        else:
            arrow, path = pyarrow.fs.FileSystem.from_uri(url)
    except (pa.ArrowException, OSError, ValueError) as error:
        problem = mask(f"cannot be opened by Arrow ({error}), nor by fsspec ({without_fsspec})", *secrets)
        raise SourceError(url, problem) from hide_cause(error, *secrets)
    return ArrowFSWrapper(arrow), path
