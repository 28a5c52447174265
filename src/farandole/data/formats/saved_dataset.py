"""Source of the Arrow streams in a folder that Hugging Face's `Dataset.save_to_disk` wrote; state.json names them.

A stream has no footer, so opening it reads the headers of its messages one after the other, and skips the bodies."""

import json
import posixpath
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from farandole.data.formats.file_systems import Files, FilesSource
from farandole.data.formats.places import Place, text_of
from farandole.data.formats.row_groups import File, RowGroup, RowGroups
from farandole.data.formats.schemas import one_schema, with_types
from farandole.data.stores.ranges import Span
from farandole.data.stores.urls import open_url
from farandole.errors import DataError, SourceError

STATE = "state.json"
SPLITS = "dataset_dict.json"

_OPENERS = 16
_CONTINUES = 0xFFFFFFFF
_RECORD_BATCH, _DICTIONARY = 3, 2  # kinds of messages; 1 is the schema


class SavedDataset(FilesSource):
    """Rows of a folder of `save_to_disk`; record batches are the row groups.

    `opened` is the URL's store, if it has been opened. Raises `SourceError` for a folder that `save_to_disk` did not
    write, for a folder of several splits, and for files that are not Arrow streams; `DataError` for columns that differ
    between files, or are encoded with a dictionary."""

    def __init__(self, url: Place, *, options: Mapping[str, object] | None = None, opened: Files | None = None) -> None:
        url = text_of(url)
        self._files = opened or Files.at(url, options)
        folder = open_url(url, options or {})[1].rstrip("/")
        with self._files.translating(url):
            if self._files.exists(f"{folder}/{SPLITS}"):
                splits = json.loads(self._files.content(f"{folder}/{SPLITS}")).get("splits", [])
                raise SourceError(url, f"holds the splits {', '.join(splits)}; name the folder of one of them")
            state = json.loads(self._files.content(f"{folder}/{STATE}"))
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise SourceError(url, "chooses rows by indices, which is not supported; save flatten_indices() of it")
        names = [each.get("filename", "") for each in state.get("_data_files") or ()]
        if not names or not all(names):
            raise SourceError(url, f"names no files of data in its {STATE}")
        self._listed = self._files.look([posixpath.join(folder, name) for name in names])
        with ThreadPoolExecutor(_OPENERS, thread_name_prefix="farandole-open") as pool:
            schemas, batches = zip(*pool.map(self._index, self._listed), strict=True)
        paths = [file.path for file in self._listed]
        self._schemas = dict(zip(paths, schemas, strict=True))
        self._spans: dict[str, list[Span]] = {
            path: [span for span, _ in each] for path, each in zip(paths, batches, strict=True)
        }
        self._common = one_schema(self._listed, schemas)
        self.schema = self._common.schema
        rows = [count for each in batches for _, count in each]
        self.row_groups: Sequence[RowGroup] = RowGroups(self._listed, list(map(len, batches)), rows)
        self._bytes: int = sum(span.last - span.first for spans in self._spans.values() for span in spans)

    def nbytes(self, columns: Sequence[str]) -> int:
        """Estimate the bytes as an equal share of all columns' bytes."""
        self._common.check(columns)
        return self._bytes * len(columns) // max(1, len(self.schema))

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Read these columns of a record batch; raises `SourceError` naming the file."""
        self._common.check(columns)
        file, span = row_group.file, self._spans[row_group.file.path][row_group.number]
        with self._files.fetching(file) as opened:
            opened.fetch(lambda: [span])
            opened.stream.seek(span.first)
            content = opened.stream.read(span.last - span.first)
            batch = pa.ipc.read_record_batch(pa.py_buffer(content), self._schemas[file.path])
        if self._files.client is None:
            self._files.check([file])
        return with_types(pa.Table.from_batches([batch]).select(list(columns)), self.schema)

    def _index(self, file: File) -> tuple[pa.Schema, list[tuple[Span, int]]]:
        """Return the schema of a stream, and the byte range and rows of each of its record batches."""
        with self._files.fetching(file) as opened:
            try:
                schema = pa.ipc.read_schema(opened.stream)
                for field in schema:
                    if pa.types.is_dictionary(field.type):
                        raise DataError(
                            field.name, f"is encoded with a dictionary in {file.path}, which is not supported"
                        )
                opened.stream.seek(0)
                return schema, list(_batches(opened.stream, file))
            except (pa.ArrowException, struct.error) as error:
                raise SourceError(file.path, f"is no whole Arrow stream: {error}") from error


def _batches(stream: pa.NativeFile, file: File) -> Iterator[tuple[Span, int]]:
    """Yield the byte range of each record batch of a stream, and its number of rows."""
    first = 0
    while first < file.size:
        stream.seek(first)
        continues, length = struct.unpack("<Ii", stream.read(8))
        if continues != _CONTINUES:
            raise SourceError(file.path, "is an Arrow stream of before version 0.15, or none")
        if length == 0:
            return
        kind, body, rows = _read_header(stream.read(length))
        last = first + 8 + length + body
        if last > file.size:
            raise SourceError(file.path, f"is cut short: a record batch ends at byte {last} of {file.size}")
        if kind == _DICTIONARY:
            raise SourceError(file.path, "has dictionaries, which are not supported")
        if kind == _RECORD_BATCH:
            yield Span(first, last), rows
        first = last
    # A complete stream ends with a mark; without it, record batches may be missing.
    raise SourceError(file.path, "is cut short: the mark of its end is missing")


def _read_header(message: bytes) -> tuple[int, int, int]:
    """Return a message's kind, the length of its body, and the rows of a record batch, from its flatbuffer."""
    root = struct.unpack_from("<I", message)[0]
    kind = _field(message, root, 1, "<B")
    body = _field(message, root, 3, "<q")
    at = root - struct.unpack_from("<i", message, root)[0]
    header = root + struct.unpack_from("<H", message, at + 4 + 2 * 2)[0]
    table = header + struct.unpack_from("<I", message, header)[0]
    return kind, body, _field(message, table, 0, "<q") if kind == _RECORD_BATCH else 0


def _field(message: bytes, table: int, number: int, form: str) -> int:
    """Return a number in a table of a flatbuffer; 0 for an absent field, because zeros are not stored."""
    fields = table - struct.unpack_from("<i", message, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", message, fields)[0]:
        return 0
    offset = struct.unpack_from("<H", message, fields + 4 + 2 * number)[0]
    return int(struct.unpack_from(form, message, table + offset)[0]) if offset else 0
