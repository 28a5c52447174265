"""Recognition of tables' folders by the marks of their formats, and the sources that read them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fsspec.implementations.local import LocalFileSystem

from farandole.data.formats.file_systems import Files
from farandole.data.formats.places import has_signs
from farandole.data.formats.saved_dataset import SPLITS, STATE, SavedDataset
from farandole.data.stores.urls import open_url
from farandole.data.tables.data_files import TableSource
from farandole.data.tables.delta import DeltaSource
from farandole.data.tables.iceberg import IcebergSource
from farandole.data.tables.marks import DELTA, ICEBERG, STREAM, TableKind, is_web, kind_of
from farandole.data.tables.stream_output import StreamSource
from farandole.errors import ConfigError, MissingExtra, SourceError
from farandole.masking import mask

log = logging.getLogger(__name__)

LoggedSource: TypeAlias = TableSource | StreamSource | SavedDataset

# Looked for in the given folder only, not above it: files of this name may be above any data.
_SAVED = TableKind("a folder of save_to_disk", STATE, "SavedDataset")


@dataclass(frozen=True, slots=True)
class TableFolder:
    """The folder of a table that is read by its log, or of a saved dataset."""

    url: str
    kind: TableKind

    def open(self, options: Mapping[str, object] | None, version: int | None, opened: Files) -> LoggedSource:
        """Open the table in its store, `opened`.

        Raises `SourceError`, also for a missing package, with the extra that installs it."""
        try:
            if self.kind == _SAVED:
                if version is not None:
                    raise ConfigError("version", f"is that of a table, and {mask(self.url)} is {self.kind.name}")
                return SavedDataset(self.url, options=options, opened=opened)
            if self.kind == STREAM:
                return StreamSource(self.url, batch=version, options=options, opened=opened)
            if self.kind == DELTA:
                return DeltaSource(self.url, version=version, options=options, opened=opened)
            return IcebergSource(self.url, snapshot=version, options=options, opened=opened)
        except MissingExtra as missing:
            problem = f"is {self.kind.name} ({self.kind.mark}), and {missing}"
            raise SourceError(self.url, problem) from missing


def find_table(urls: str | Sequence[str], options: Mapping[str, object] | None, files: Files) -> TableFolder | None:
    """Return the table if `urls` is only the URL of its folder or metadata file; None for anything else.

    `files` is the opened store."""
    asked = [urls] if isinstance(urls, str) else list(urls)
    if len(asked) != 1:
        return None
    fs, place = open_url(asked[0], options or {})
    if has_signs(place, local=isinstance(fs, LocalFileSystem)):  # in the path only: a URL's query has a "?"
        return None
    if place.endswith(".metadata.json"):
        return TableFolder(asked[0], ICEBERG)
    if is_web(fs):
        return None
    folder = place.rstrip("/")
    kind = kind_of(fs, folder, files.client)
    if kind is None and _is_saved(files, folder):
        kind = _SAVED
    return TableFolder(asked[0], kind) if kind is not None and kind.source else None


def _is_saved(files: Files, folder: str) -> bool:
    """Return whether Hugging Face's save_to_disk has written this folder, with one data set or several splits."""
    try:
        return any(files.exists(f"{folder}/{mark}") for mark in (STATE, SPLITS))
    except SourceError as error:  # without access to listings, the files may still be readable
        log.info("%s", error)
        return False
