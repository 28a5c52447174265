"""Tables that have a log: their marks, and checks that refuse to read their files without the log.

A table's folders also hold files with rows that were removed or replaced."""

import logging
import os
import posixpath
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

import fsspec
from fsspec.implementations.local import LocalFileSystem

from farandole.data.formats.places import inner_path
from farandole.data.stores.ranges import RangeClient
from farandole.errors import SourceError
from farandole.masking import mask

log = logging.getLogger(__name__)

# The most folders that are checked in a remote file system, and how many at a time, for any number of files.
_MOST_PROBED = 32
_PROBES = 16


@dataclass(frozen=True, slots=True)
class TableKind:
    """A table format: its name, the path that marks a table's folder, and farandole's source for it, if any."""

    name: str
    mark: str
    source: str | None = None


DELTA = TableKind("a Delta table", "_delta_log", "DeltaSource")
ICEBERG = TableKind("an Iceberg table", "metadata/*.metadata.json", "IcebergSource")
_HUDI = TableKind("a Hudi table", ".hoodie")
STREAM = TableKind("the output of a Spark stream", "_spark_metadata", "StreamSource")
_KINDS = (DELTA, _HUDI, STREAM)
_ICEBERG_FILE = re.compile(r"metadata/[^/]*\.metadata\.json")
_HUDI_PARTITION = ".hoodie_partition_metadata"


def refuse_listed_table(folder: str, paths: Iterable[str]) -> None:
    """Raise `SourceError` if one of `paths`, which are the files below `folder`, belongs to a table's log.

    Makes no request."""
    for path in paths:
        inner = inner_path(path, folder)
        parts = inner.split("/")
        for kind in _KINDS:
            if kind.mark in parts:
                _refuse(posixpath.join(folder, *parts[: parts.index(kind.mark)]), kind)
        if parts[-1].startswith(_HUDI_PARTITION):
            _refuse(posixpath.join(folder, *parts[:-1]), _HUDI)
        if _ICEBERG_FILE.fullmatch("/".join(parts[-2:])):
            _refuse(posixpath.join(folder, *parts[:-2]), ICEBERG)


def refuse_table_above(
    fs: fsspec.AbstractFileSystem, folders: Sequence[str], client: RangeClient | None = None
) -> None:
    """Raise `SourceError` if one of `folders`, or a folder above it, is the folder of a table.

    In a remote file system, makes a few requests per folder, for at most `_MOST_PROBED` folders, and skips folders of
    partitions ("day=1"). Does nothing for web servers, which have no folders.
    """
    if is_web(fs):
        return
    if isinstance(fs, LocalFileSystem):
        above = _with_parents([*folders, *map(os.path.realpath, folders)])
    else:
        above = [folder for folder in _with_parents(folders) if "=" not in posixpath.basename(folder)][:_MOST_PROBED]
    with ThreadPoolExecutor(_PROBES, thread_name_prefix="farandole-look") as pool:
        look = map if isinstance(fs, LocalFileSystem) else pool.map
        for folder, kind in zip(above, look(lambda folder: kind_of(fs, folder, client), above), strict=True):
            if kind is not None:
                _refuse(folder, kind)


def is_web(fs: fsspec.AbstractFileSystem) -> bool:
    """Return whether this is a web server, which has no folders."""
    return bool({"http", "https"} & set([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol))


def _with_parents(folders: Iterable[str]) -> list[str]:
    """Return the folders and all folders above them, the outermost first."""
    found = set()
    for folder in folders:
        place = folder.rstrip("/")
        while place and place not in found:
            found.add(place)
            place = posixpath.dirname(place)
    return sorted(found, key=lambda place: (place.count("/"), place))


def kind_of(fs: fsspec.AbstractFileSystem, folder: str, client: RangeClient | None = None) -> TableKind | None:
    """Return the kind of table whose folder this is; None for other folders, and if the file system refuses access."""
    try:
        if client is not None and not is_web(fs):
            found = next((kind for kind in _KINDS if client.first_page(f"{folder}/{kind.mark}/")), None)
            notes = [] if found else [file.path for file in client.first_page(f"{folder}/metadata/")]
        else:
            found = next((kind for kind in _KINDS if fs.exists(f"{folder}/{kind.mark}")), None)
            notes = [] if found or not fs.isdir(f"{folder}/metadata") else fs.ls(f"{folder}/metadata", detail=False)
        return ICEBERG if any(map(_ICEBERG_FILE.search, notes)) else found
    except Exception as error:  # of any class; without access to a folder above, the files may still be readable
        log.info("%s cannot be looked at for a table's log: %s", mask(folder), mask(str(error)))
        return None


def _refuse(folder: str, kind: TableKind) -> NoReturn:
    way = (
        f"Name this folder alone, not parts of it or others beside it: then ParquetSource, {kind.source} and readers "
        "read its log. Filters choose partitions"
        if kind.source
        else "Read it with Spark: pass the DataFrame to farandole.spark.run, or write its rows to another folder as "
        "plain Parquet files, and name that folder here"
    )
    raise SourceError(
        folder or "/", f"is {kind.name} ({kind.mark}), whose files also hold rows that do not belong to it. {way}"
    )
