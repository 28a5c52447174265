"""The client of a URL's store, and listings of a store's files."""

import bisect
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import fsspec
from fsspec.implementations.local import LocalFileSystem

from farandole.data.formats.row_groups import File
from farandole.data.stores.ranges import RangeClient
from farandole.data.stores.request_limiter import MOST_IN_FLIGHT

_PAGE = 1000  # objects per page of a listing


def range_client(
    url: str, options: Mapping[str, object], fs: fsspec.AbstractFileSystem, *, warn: bool
) -> RangeClient | None:
    """Return a client for the store of a URL; None for local files, and for stores that are read through fsspec alone.

    With `warn`, logs a warning if this kind of store has a client, but the client cannot be made."""
    if isinstance(fs, LocalFileSystem):
        return None
    # Imported here: the clients' modules take a tenth of the time in which a rank of local files starts.
    from farandole.data.stores.clients import make_client

    return make_client(url, options, fs, warn=warn)


def list_places(client: RangeClient, places: Sequence[str]) -> list[tuple[list[File], bool]] | None:
    """Return for each place its files, and whether it is a folder; None if the store has no listings.

    Lists all places with one listing if that takes few requests. Raises as `RequestLimiter.call` does."""
    shared = os.path.commonprefix(places)  # noqa: RUF071 - may end within a name: listings accept any prefix
    common = client.listing(shared, _most_pages(len(places))) if len(places) > 1 and "/" in shared else None
    if common is not None:
        listed = _Listing(common)
        return [listed.at(place) for place in places]
    found = [_listed(client, place) for place in places]
    return [_Listing(files).at(place) for place, files in zip(places, found, strict=True) if files is not None] or None


def _listed(client: RangeClient, place: str) -> list[File] | None:
    """List a file, or a folder without its siblings if those make the listing long ("train" and "train-2023/...")."""
    short = client.listing(place, 2)
    return short if short is not None else client.listing(f"{place}/", None) or client.listing(place, None)


class _Listing:
    """Files by path."""

    def __init__(self, files: Sequence[File]) -> None:
        self._files = sorted(files, key=lambda file: file.path)  # not every store lists them in this order
        self._paths = [file.path for file in self._files]

    def at(self, place: str) -> tuple[list[File], bool]:
        """Return the file at `place` or the files in folder `place`, and whether it is a folder."""
        here = bisect.bisect_left(self._paths, place)
        if self._paths[here : here + 1] == [place]:
            return [self._files[here]], False
        folder = place.rstrip("/")
        first, last = (bisect.bisect_left(self._paths, folder + sign) for sign in "/0")  # "0" comes after "/"
        # Some tools mark folders with empty objects whose paths end in "/".
        return [file for file in self._files[first:last] if not file.path.endswith("/")], True


def look_at(client: RangeClient, paths: Sequence[str]) -> list[File]:
    """Return the current size and mark of each file; raises `FileNotFoundError` for a file that is gone.

    Uses one listing if that takes fewer requests than one for each file."""
    shared = os.path.commonprefix(paths)  # noqa: RUF071
    if len(paths) > 2 and "/" in shared:
        listed = client.listing(shared, _most_pages(len(paths)))
        if listed is not None:
            files = {file.path: file for file in listed}
            gone = next((path for path in paths if path not in files), None)
            if gone is not None:
                raise FileNotFoundError(gone)
            return [files[path] for path in paths]

    def look(path: str) -> File:
        return client.limiter.call(client.url(path), lambda: client.look(path))

    if len(paths) == 1:
        return [look(paths[0])]
    with ThreadPoolExecutor(MOST_IN_FLIGHT, thread_name_prefix="farandole-look") as pool:
        return list(pool.map(look, paths))


def _most_pages(count: int) -> int:
    return 2 * count // _PAGE + 2
