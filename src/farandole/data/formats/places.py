"""Places of files as users give them, URLs and paths, and the files in local folders."""

import logging
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from urllib.parse import unquote

import fsspec
from fsspec.implementations.local import LocalFileSystem

from farandole.data.formats.row_groups import File
from farandole.errors import ConfigError, SourceError
from farandole.masking import mask

log = logging.getLogger(__name__)

Place = str | os.PathLike[str]
Places = Place | Sequence[Place]

_SIGNS = "*?["  # wildcards of globs
_LOCAL = re.compile(r"(file|local):")


def texts_of(places: Places) -> str | list[str]:
    """Return URLs and paths as texts; for a `FlyteDirectory` or `FlyteFile`, its URL in the store.

    Calling `__fspath__` of those would download all files. Raises `ConfigError` for an object that is neither a place
    nor a collection of places."""
    if isinstance(places, str | os.PathLike | bytes | bytearray | Mapping) or not isinstance(places, Iterable):
        return text_of(places)
    return [text_of(each) for each in places]


def text_of(place: Place) -> str:
    """Return one place as text, as `texts_of` does."""
    if isinstance(place, str):
        return place
    if not isinstance(place, os.PathLike):
        raise ConfigError("url", f"must be a URL or a path, not {type(place).__name__}")
    return str(getattr(place, "remote_source", None) or os.fspath(place))


def local_path(url: str) -> str | None:
    """Return the absolute path of a local path or URL; None for URLs of other file systems.

    "%20" in a URL means a space, unless a file or folder with "%20" in its name exists."""
    if not _LOCAL.match(url):
        if not url.startswith(("/", ".", "~")) and ("://" in url or _is_chain(url)):
            return None
        return str(LocalFileSystem._strip_protocol(url))
    path = str(LocalFileSystem._strip_protocol(url))
    fixed = os.path.dirname(re.split(r"[*?\[]", path)[0]) if has_signs(path) else path
    return path if os.path.lexists(fixed) else unquote(path)


def _is_chain(url: str) -> bool:
    """Return whether fsspec reads the URL as one file system on top of another: "simplecache::..."."""
    first, sign, _ = url.partition("::")
    return bool(sign) and first in fsspec.available_protocols()


def has_signs(place: str, *, local: bool = True) -> bool:
    """Return whether a path is a glob; a local path that exists is not, even if it has wildcards in its name."""
    return any(sign in place for sign in _SIGNS) and not (local and os.path.lexists(place))


def inner_path(path: str, folder: str) -> str:
    """Return the path of a file below a folder, relative to the folder."""
    prefix = f"{folder.rstrip('/')}/"
    # The usual case; `relpath` takes 15 us.
    return path[len(prefix) :] if path.startswith(prefix) else posixpath.relpath(path, folder)


def is_note(inner: str) -> bool:
    """Return whether a path below a data set belongs to another tool: one of its names begins with "_" or ".".

    Such are `_SUCCESS`, and `_temporary/`, where Spark leaves the rows of a job that failed."""
    return any(part.startswith(("_", ".")) and "=" not in part for part in inner.split("/"))


def is_note_of_glob(path: str, glob: str) -> bool:
    """Return whether a path that a glob matched is a note; one in a folder of a note only if the glob names none."""
    top = posixpath.dirname(re.split(r"[*?\[]", glob)[0])
    folder, name = posixpath.split(inner_path(path, top))
    return is_note(name) or (is_note(folder) and not is_note(posixpath.dirname(inner_path(glob, top))))


def warn_of_links(files: Sequence[File]) -> None:
    """Warn of the first two of these local files that are one, as by a link; files that are gone are left out."""
    alike = Counter((file.size, file.mark) for file in files)
    known: dict[tuple[int, int], str] = {}
    for file in files:
        if alike[file.size, file.mark] == 1:  # one file has one size and one time
            continue
        with suppress(OSError):
            found = os.stat(file.path)
            other = known.setdefault((found.st_dev, found.st_ino), file.path)
            if other != file.path and found.st_ino:
                text = "%s and %s are one file, whose rows come twice; remove one of the two paths"
                log.warning(text, mask(other), mask(file.path))
                return


def files_below(folder: str) -> tuple[list[str], list[str]]:
    """Return the files in a local folder and its subfolders, and the links to folders that were followed.

    Raises `SourceError` for a link to a folder that contains the link, `OSError` for a folder that cannot be listed. A
    folder without permission to list it is left out if its name marks it as no data: "_x", ".x", "lost+found"."""
    files: list[str] = []
    links: list[str] = []
    waiting: list[tuple[str, tuple[str, ...]]] = [(folder, (os.path.realpath(folder),))]
    while waiting:
        path, above = waiting.pop()
        for entry in _entries(path):
            if not entry.is_dir():
                files.append(entry.path)
                continue
            real = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(above[-1], entry.name)
            if any(each == real or each.startswith(f"{real}/") for each in above):
                raise SourceError(entry.path, "is a link to a folder that it lies in; remove it")
            if entry.is_symlink():
                links.append(entry.path)
            waiting.append((entry.path, (*above, real)))
    return files, links


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except PermissionError:
        if os.path.basename(folder).startswith(("_", ".", "lost+found")):
            return []
        raise
