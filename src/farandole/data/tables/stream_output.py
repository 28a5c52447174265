"""Output folders of Spark's streaming queries: the files of finished batches, which the folder's log names.

The log is the folder `_spark_metadata`. It has a file per batch, such as `7`, and from time to time a file that also
holds all earlier batches, such as `9.compact`. A file begins with the line "v1"; each other line is the JSON of a data
file. Files of failed batches are in the output folder, too, but not in the log."""

import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import unquote, urlsplit

from farandole.data.formats.file_systems import Files
from farandole.data.formats.parquet_files import ParquetFiles
from farandole.data.formats.places import Place, text_of
from farandole.data.formats.row_groups import File
from farandole.data.stores.urls import open_url
from farandole.data.tables.versions import check_asked
from farandole.errors import SourceError
from farandole.masking import mask

_LOG = "_spark_metadata"
_BATCH = re.compile(r"(\d+)(\.compact)?")
_FORMAT = "v1"


class StreamSource(ParquetFiles):
    """Rows that a Spark streaming query has written as Parquet in batches 0 to `batch`, by default the newest.

    `options` are the file system's, as for `ParquetSource`; `opened` is the URL's store, if it has been opened. Opens
    the files for their footers, and does not list the folder. Raises `SourceError` for a folder without a log, for a
    batch that the log does not have or has merged with later ones, and for missing files.
    """

    def __init__(
        self,
        url: Place,
        *,
        batch: int | None = None,
        options: Mapping[str, object] | None = None,
        opened: Files | None = None,
    ) -> None:
        check_asked("batch", batch)
        url = text_of(url)
        self._url, self._options = url, options
        files = opened or Files.at(url, options)
        found, listed = files_of_batches(url, options, batch, files)
        if found is None:
            raise SourceError(url, "is the output of a Spark stream that has not finished a batch yet")
        if not listed:
            raise SourceError(url, "holds no file of data: no batch of this Spark stream had rows")
        self._batch = found
        super().__init__(stream_files(url, files), listed, open_url(url, options or {})[1].rstrip("/"))

    @property
    def version(self) -> int:
        """The number of the last batch that is read."""
        return self._batch

    def at(self, version: int) -> "StreamSource":
        """Open the batches up to batch `version`; raises `SourceError` if the log does not list them."""
        return StreamSource(self._url, batch=version, options=self._options, opened=replace(self._files, gone=""))


def stream_files(url: str, files: Files) -> Files:
    """Return `files`, the file system of a Spark stream's output, with the error text for files missing from it."""
    gone = f"is not there, though it is in the log of {mask(url)}: it was removed by hand, or by a retention time"
    return replace(files, gone=gone)


def files_of_batches(
    url: str, options: Mapping[str, object] | None, batch: int | None, files: Files
) -> tuple[int | None, list[File]]:
    """Return the last batch and the data files of batches 0 to `batch`, by default all; (None, []) if none is finished.

    `files` is the opened file system. Raises `SourceError` as `StreamSource` does."""
    folder = open_url(url, options or {})[1].rstrip("/")
    names = [posixpath.basename(path) for path in files.paths_in(f"{folder}/{_LOG}")]
    found = {int(match[1]): match for match in map(_BATCH.fullmatch, names) if match}
    if not found:
        return None, []
    last, logs = _logs(url, found, batch)
    texts = [files.content(f"{folder}/{_LOG}/{name}").decode() for name in logs]
    return last, _listed(url, folder, dict(zip(logs, texts, strict=True)))


def _logs(url: str, found: Mapping[int, re.Match[str]], asked: int | None) -> tuple[int, list[str]]:
    """Return the last batch to read, and the log's files that together hold all batches up to it."""
    last = max(found) if asked is None else asked
    needed: list[str] = []
    for number in range(last, -1, -1):
        match = found.get(number)
        if match is None:
            raise SourceError(
                url,
                f"has no batch {last} in its log, or not all batches before it: {number} is not there. Its batches are "
                f"{min(found)} to {max(found)}",
            )
        needed.append(match[0])
        if match[2]:
            break
    return last, needed[::-1]


def _listed(url: str, folder: str, logs: Mapping[str, str]) -> list[File]:
    """Return the data files that the log names, sorted by path."""
    found: dict[str, File] = {}
    for name, text in logs.items():
        first, *lines = text.splitlines() or [""]
        if first != _FORMAT:
            raise SourceError(url, f"has a log that is not supported: {_LOG}/{name} begins with {first[:40]!r}")
        for line in filter(None, lines):
            try:
                entry = json.loads(line)
                path = _place(folder, str(entry["path"]))
                file = File(path, int(entry["size"]), str(entry["modificationTime"]))
                removed = entry["action"] == "delete"
            except (KeyError, TypeError, ValueError) as error:
                raise SourceError(url, f"has a damaged log: {_LOG}/{name}: {error!r}") from error
            if removed:
                found.pop(path, None)
            else:
                found[path] = file
    return [found[path] for path in sorted(found)]


def _place(folder: str, location: str) -> str:
    """Return the path of a file in the log; the folder may have been moved or copied since it was written."""
    parts = urlsplit(location)
    for place in (unquote(parts.path), f"{parts.netloc}{unquote(parts.path)}"):
        if place.startswith(f"{folder}/"):
            return place
    *above, name = unquote(parts.path).split("/")
    while above and "=" in above[-1]:  # Spark makes no other folders below its output
        name = f"{above.pop()}/{name}"
    return f"{folder}/{name}"
