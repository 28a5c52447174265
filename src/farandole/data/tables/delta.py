"""Delta tables: files, rows, bounds and deletion vectors at one version, as deltalake reads them from the log."""

import hashlib
import json
import posixpath
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from farandole.data.formats.file_systems import Files
from farandole.data.formats.places import Place, text_of
from farandole.data.formats.row_groups import File
from farandole.data.stores.options import delta_url, object_store_options
from farandole.data.stores.urls import open_url
from farandole.data.tables.data_files import DataFile, TableColumn, TableSource
from farandole.data.tables.versions import check_asked
from farandole.errors import FarandoleError, SourceError
from farandole.extras import importing
from farandole.masking import hide_cause, mask, secret_values

if TYPE_CHECKING:
    from deltalake import DeltaTable

# Supported features of a table's readers. This module implements those that change which rows or columns a file holds;
# deltalake implements those of the log.
_FEATURES = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
_PHYSICAL = "delta.columnMapping.physicalName"
_ARROW = "\u21b3"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Writers truncate the bounds of times in the log to milliseconds.
_CUT = timedelta(milliseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_COMMIT = re.compile(r".*/\d{20}\.json")
_READERS = 16
_PERCENT = re.compile(r"%[0-9A-Fa-f]{2}")
_ESCAPED = re.compile(rb"(\\u00[0-9A-Fa-f]{2})+")
_ELSEWHERE = re.compile(r"/|[A-Za-z][\w+.-]*:/")  # Hadoop writes file:/a/b


class DeltaSource(TableSource):
    """Rows of a Delta table at one version: the newest, `version`, or the newest at `timestamp` (UTC if it is naive).

    `options` are the file system's, as for `ParquetSource`. deltalake reads the log. For s3, `options` and the URL's
    credentials are translated for it; for other stores, pass deltalake's own options as `log_options`. `opened` is the
    URL's store, if it has been opened. Opens only data files whose row count the log does not list. Raises
    `SourceError` for a folder without a table, a version that is gone, and a feature that is not supported, which it
    names; `MissingExtra` without deltalake.
    """

    def __init__(
        self,
        url: Place,
        *,
        version: int | None = None,
        timestamp: datetime | None = None,
        options: Mapping[str, object] | None = None,
        log_options: Mapping[str, str] | None = None,
        opened: Files | None = None,
    ) -> None:
        check_asked("version", version, timestamp)
        url = text_of(url)
        self._url, self._options, self._log_options = url, options, log_options
        self._folder = open_url(url, options or {})[1]
        files = opened or Files.at(url, options)
        table = self._open(files, version, timestamp)
        self._version = int(table.version())
        self._known = pa.table(table.get_add_actions(flatten=True))
        _check_features(url, table)
        columns = _columns(url, table)
        self._widened = any(each.startswith("typeWidening") for each in table.protocol().reader_features or ())
        self._physical = {column.field.name: column.names[0] for column in columns}
        data = self._data_files(table, columns)
        gone = (
            f"is not there: version {self.version} of {mask(url)} was vacuumed, or the file removed by hand; "
            "open a newer version"
        )
        super().__init__(files, data, columns, gone)

    @property
    def version(self) -> int:
        """The version of the table that is read."""
        return self._version

    def at(self, version: int) -> "DeltaSource":
        """Open another version; raises `SourceError` if the log no longer has it."""
        return DeltaSource(
            self._url,
            version=version,
            options=self._options,
            log_options=self._log_options,
            opened=replace(self._files, gone=""),
        )

    def _open(self, files: Files, version: int | None, timestamp: datetime | None) -> "DeltaTable":
        with importing("farandole.data"):
            from deltalake import DeltaTable
        if (code := _PERCENT.search(self._folder)) is not None:
            problem = f"has '{code[0]}' in its path, which deltalake reads as '{unquote(code[0])}'; rename the folder"
            raise SourceError(self._url, problem)
        lacking = "" if version is None else f"version {version} "
        advice = "" if version is None else "; it may have been vacuumed, or never have been there"
        with self._translating(f"{lacking}cannot be opened as a Delta table", advice):
            table = DeltaTable(delta_url(self._url), version=version, storage_options=self._log_access() or None)
            if timestamp is not None:
                newest = int(table.version())
                table.load_as_version(_version_at(files, self._url, self._folder, newest, timestamp))
        return table

    def _log_access(self) -> dict[str, str]:
        return object_store_options(self._url, self._options or {}) | dict(self._log_options or {})

    @contextmanager
    def _translating(self, problem: str, advice: str = "") -> Iterator[None]:
        """Turn errors of the body into a `SourceError`; deltalake and the store's client have classes of their own."""
        secrets = secret_values(self._log_access())
        try:
            yield
        except FarandoleError:
            raise
        except Exception as error:
            text = mask(f"{problem}: {_in_a_line(error)}{advice}", *secrets)
            raise SourceError(self._url, text) from hide_cause(error, *secrets)

    def _data_files(self, table: "DeltaTable", columns: Sequence[TableColumn]) -> list[DataFile]:
        """Return the files sorted by path; sorts `self._known`, the log's table of files, in the same order."""
        paths = [self._place(path) for path in self._known["path"].to_pylist()]
        order = np.argsort(np.array(paths, object), kind="stable")
        self._known = self._known.take(pa.array(order))
        kept = self._deletion_vectors(table)
        partitions = {}
        for name in table.metadata().partition_columns if paths else ():
            if f"partition.{name}" not in self._known.column_names:
                raise SourceError(self._url, f"is partitioned by {name}, but its log has no values of that")
            partitions[name] = [_unescaped(value) for value in self._known[f"partition.{name}"].to_pylist()]
        layout = hashlib.sha256(repr([(column.field, column.names) for column in columns]).encode()).hexdigest()[:8]
        facts = zip(*(self._known[name].to_pylist() for name in _FACTS), strict=True)
        made = []
        for place, (number, (size, changed, rows)) in enumerate(zip(order.tolist(), facts, strict=True)):
            path = paths[number]
            bits, vector = kept.pop(path, (None, ""))
            file = File(path, size, f"{changed} {layout} {vector}".strip())
            constants = {name: values[place] for name, values in partitions.items()}
            made.append(DataFile(file, -1 if rows is None else rows, constants, bits))
        if kept:
            raise SourceError(self._url, f"has deletion vectors for files that it does not have: {min(kept)}")
        return made

    def _place(self, path: str) -> str:
        if _ELSEWHERE.match(path):
            raise SourceError(
                self._url, f"has files elsewhere, as a shallow clone ({mask(path)}), which is not supported; copy it"
            )
        return posixpath.join(self._folder, unquote(path))

    def _deletion_vectors(self, table: "DeltaTable") -> dict[str, tuple[NDArray[np.uint8], str]]:
        """Return for files with deleted rows, by path, a bit per row, False for a deleted one, and the bits' hash."""
        found: dict[str, tuple[NDArray[np.uint8], str]] = {}
        if "deletionVectors" not in (table.protocol().reader_features or ()):
            return found
        root = unquote(urlsplit(table.table_uri).path).rstrip("/")
        with self._translating("has deletion vectors that cannot be read"):
            vectors = pa.table(table.deletion_vectors())
        for path, keep in zip(*vectors.columns, strict=True):
            inner = unquote(urlsplit(path.as_py()).path).removeprefix(root).lstrip("/")
            bits = np.packbits(keep.values.to_numpy(zero_copy_only=False))
            found[posixpath.join(self._folder, inner)] = bits, hashlib.sha256(bits.tobytes()).hexdigest()[:16]
        return found

    def _file_bounds(self, column: str) -> tuple[pa.Array, pa.Array, NDArray[np.int64]] | None:
        physical, kind = self._physical[column], self.schema.field(column).type
        names = [f"{side}.{physical}" for side in ("min", "max")]
        if "." in physical or any(name not in self._known.column_names for name in names):
            return super()._file_bounds(column)
        if self._widened and pa.types.is_float64(kind):
            return None  # bounds of files of float32 are its shortest digits, 0.1 where the file has 0.100000001
        least, most = (self._known[name].combine_chunks().cast(kind) for name in names)
        if pa.types.is_timestamp(kind):
            least, most = _widened(least, -_CUT), _widened(most, _CUT)
        if pa.types.is_floating(kind):
            least, most = _without_nan(least), _without_nan(most)
        counts = f"null_count.{physical}"
        if counts not in self._known.column_names:
            return least, most, np.full(len(least), -1)
        nulls = self._known[counts].fill_null(-1).to_numpy()
        return least, most, nulls


def _unescaped(value: object) -> object:
    """Return a value of a partition; bytes, which logs hold as "\\u0001\\u0002", deltalake leaves as this text."""
    if isinstance(value, bytes) and _ESCAPED.fullmatch(value):
        return bytes.fromhex(value.decode().replace("\\u00", ""))
    return value


def _version_at(files: Files, url: str, folder: str, newest: int, timestamp: datetime) -> int:
    """Return the last version up to `newest` that was committed at `timestamp` or before, by the times in the commits.

    deltalake itself goes by the times of the log's files, which are new in a copy of the table."""
    asked = timestamp if timestamp.tzinfo else timestamp.replace(tzinfo=UTC)
    paths = filter(_COMMIT.fullmatch, files.paths_in(posixpath.join(folder, "_delta_log")))
    named = {int(posixpath.basename(path)[:20]): path for path in paths}
    versions = range(min(named, default=newest), newest + 1)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="farandole-commits") as pool:
        found = list(pool.map(lambda version: _time_of(files, named.get(version)), versions))
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        lacking = versions[found.index(None)]
        raise SourceError(url, f"has no time of version {lacking} in its log; name a version by its number")
    # A version is not older than the one before it, whatever its writer's clock shows.
    place = bisect_right(list(accumulate(known, max)), (asked - _EPOCH) // timedelta(milliseconds=1))
    if not place:
        oldest = _EPOCH + timedelta(milliseconds=known[0])
        raise SourceError(url, f"had no version at {asked}: the oldest that its log has is of {oldest}")
    return versions[place - 1]


def _time_of(files: Files, commit: str | None) -> int | None:
    """Return the milliseconds since 1970 at which a commit was made; None if it does not tell."""
    lines = [] if commit is None else files.content(commit).splitlines()
    actions = (json.loads(line) for line in lines if b'"commitInfo"' in line)
    told: dict[str, int] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    return told.get("inCommitTimestamp", told.get("timestamp"))


_FACTS = ("size_bytes", "modification_time", "num_records")


def _check_features(url: str, table: "DeltaTable") -> None:
    protocol = table.protocol()
    unknown = sorted(set(protocol.reader_features or ()) - _FEATURES)
    if unknown or protocol.min_reader_version > 3:
        named = ", ".join(unknown) or f"version {protocol.min_reader_version} of the protocol"
        raise SourceError(url, f"uses {named} of Delta, which is not supported; write its rows to a plain table")
    mode = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mode not in ("none", "name"):
        raise SourceError(url, f"maps columns by '{mode}', which is not supported; only the mode 'name' is")


def _columns(url: str, table: "DeltaTable") -> list[TableColumn]:
    schema = pa.schema(table.schema().to_arrow())
    declared = {field["name"]: field for field in json.loads(table.schema().to_json())["fields"]}
    mapped = table.metadata().configuration.get("delta.columnMapping.mode", "none") == "name"
    columns = []
    for field in schema:
        physical = declared[field.name].get("metadata", {}).get(_PHYSICAL, field.name) if mapped else field.name
        renamed = mapped and _renamed_within(declared[field.name]["type"])
        problem = f"has fields that column mapping renamed in {mask(url)}, which is not supported" if renamed else ""
        plain = field.with_nullable(True).remove_metadata()
        columns.append(TableColumn(field=plain, names=(physical,), problem=problem))
    return columns


def _renamed_within(kind: object) -> bool:
    """Return whether column mapping gives a field of a nested struct another name in files."""
    if isinstance(kind, list):
        return any(_renamed_within(each) for each in kind)
    if not isinstance(kind, dict):
        return False
    own = kind.get("metadata", {}).get(_PHYSICAL, kind.get("name")) if "name" in kind else None
    return own != kind.get("name") or any(_renamed_within(kind.get(name)) for name in _INNER)


_INNER = ("type", "fields", "elementType", "keyType", "valueType")


def _widened(values: pa.Array, by: timedelta) -> pa.Array:
    import pyarrow.compute as pc

    return pc.add(values, pa.scalar(by, pa.duration(values.type.unit)))


def _without_nan(values: pa.Array) -> pa.Array:
    """Return bounds without NaN, which Spark takes for the greatest number: other numbers are no less than it here."""
    import pyarrow.compute as pc

    return pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)


def _in_a_line(error: Exception) -> str:
    """Return one line: an error's first line, and the causes that deltalake writes below it after arrows."""
    first, *rest = str(error).strip().split("\n")
    causes = [_COLOUR.sub("", line).strip() for line in rest if _ARROW in line]
    return ": ".join([first, *(cause.removeprefix(_ARROW).strip() for cause in causes)])
