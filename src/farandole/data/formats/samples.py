"""Source of samples in files that are not tables: images, text, JSON lines, tar shards, bytes."""

import fnmatch
import io
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from typing import TypeAlias

import pyarrow as pa

from farandole.data.formats.compression import is_packed, unpack
from farandole.data.formats.fields import Arrays, Field, Numbers
from farandole.data.formats.file_systems import Files, FilesSource, open_and_find
from farandole.data.formats.function_keys import key_of
from farandole.data.formats.places import Places, texts_of
from farandole.data.formats.row_groups import File, RowGroup, RowGroups, rows_in
from farandole.data.formats.sample_columns import (
    Stack,
    check_columns,
    column_of,
    columns_of,
    first_values,
    numbers_of,
    schema_of,
)
from farandole.data.formats.sample_formats import (
    FORMATS,
    Block,
    Decode,
    Format,
    Images,
    Json,
    format_of,
    make_format,
)
from farandole.data.loading.agreement import Gather, shared_out, together
from farandole.data.loading.values import Values, ValuesOrLoose
from farandole.data.stores.ranges import Span
from farandole.data.stores.request_limiter import MOST_IN_FLIGHT
from farandole.errors import ConfigError, DataError, SourceError

# Choice of files by name: a pattern such as "*.png", several patterns, or a function of the path.
Named: TypeAlias = str | Sequence[str] | Callable[[str], bool]

# Threads that find samples; fewer for compressed files, which are whole in memory.
_OPENERS, _UNPACKERS = 16, 4
# Bytes to request of a file of unknown size. The answer is the whole file if the file is smaller.
_FIRST_BYTES = 8 << 20
_WHOLE_FILE = Block(1)
# Bytes of the largest block that is read together with others.
_SMALL_BYTES = 256 << 10
# To find its samples: bytes of the largest local file that is read at once, and that are read at a time of larger ones.
# Threads that read header by header would wait for Python's lock.
_WHOLE_BYTES, _BUFFER_BYTES = 4 << 20, 256 << 10
# Least rows of a lane that are shuffled together, for samples in blocks.
_LEAST_WINDOW = 8
# The most lines of JSON that decide the columns and their types.
_DECIDING = 1024


def files(
    urls: Places,
    *,
    format: str | None = None,
    decode: Decode | None = None,
    where: Named | None = None,
    size: tuple[int, int] | None = None,
    orient: bool = True,
    options: Mapping[str, object] | None = None,
    gather: Gather | None = None,
) -> "FileSource":
    """Return the samples in files that are not tables, as a source for `Loader`.

    `urls` is a folder, a file, a glob, or a list of these, as local paths or URLs in any file system of fsspec. A
    `FlyteDirectory` is read from its store, without a download. `format` is "images" (a folder per class), "jsonl",
    "text", "tar" or "bytes"; by default the files' suffixes decide. `decode` gets a sample as a dictionary and returns
    its columns: numbers, texts, bytes and arrays. It runs on the loader's threads, or in its processes with
    `Reading(processes=True)`. `where` chooses files by name. Images are resized to `size` = (height, width), and
    turned by their EXIF orientation unless `orient` is False. `options` are the file system's. With `gather`, opening
    is collective, and the ranks divide the requests for a store's files.

    Raises `SourceError` for files, `DataError` for samples, `ConfigError` for settings.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError("format", f"must be one of {', '.join(FORMATS)}, got {format!r}")

    asked = texts_of(urls)

    def find(opened: Files) -> list[File]:
        listed = Files.find(asked, "", options, opened=opened)[1]
        chosen = [file for file in listed if _is_named(file.path, where)]
        if not chosen:
            raise SourceError(str(asked), "holds no file that `where` chooses")
        return chosen

    opened, listed = open_and_find(asked, options, find, gather)
    kind = format or format_of([file.path for file in listed])
    suffixes = FORMATS[kind]().suffixes if format is None or kind == "images" else ()
    if suffixes:
        listed = [file for file in listed if file.path.lower().endswith(suffixes)]
    folders = {posixpath.basename(posixpath.dirname(file.path)) for file in listed}
    made = make_format(kind, size=size, orient=orient, classes=sorted(folders))
    return FileSource(opened, listed, made, decode, gather)


class FileSource(FilesSource):
    """Source of samples in files of one format; `classes` are the names of images' folders, by label. See `files`."""

    def __init__(
        self,
        opened: Files,
        listed: Sequence[File],
        format: Format,
        decode: Decode | None,
        gather: Gather | None = None,
    ) -> None:
        self._files, self._listed, self._format = opened, listed, format
        self._decode = decode or format.decode
        self.classes: tuple[str, ...] = format.classes if isinstance(format, Images) else ()
        blocks = None if format.whole else self._index(gather)
        self._blocks = {} if blocks is None else {file.path: each for file, each in zip(listed, blocks, strict=True)}
        counts = [1] * len(listed) if blocks is None else [len(each) for each in blocks]
        rows = counts if blocks is None else [block.rows for each in blocks for block in each]
        self.row_groups: Sequence[RowGroup] = RowGroups(listed, counts, rows)
        if not self.row_groups:
            raise DataError("", "there are no samples in these files")
        # A function of the user may take long.
        deciding = _DECIDING if isinstance(format, Json) and decode is None else 1
        names, first = zip(
            *together(lambda: list(islice(self._decoded(self.row_groups[0]), deciding)), gather), strict=True
        )
        self.schema = together(lambda: schema_of(first, names), gather)
        self._row_bytes = columns_of([first_values(first)], names[:1], self.schema)

    def identity(self, row_group: RowGroup) -> str:
        """Return what identifies format and `decode`; raises `ConfigError` if `decode` cannot be pickled."""
        return self._identity

    @cached_property
    def _identity(self) -> str:
        decode = self._decode
        if decode == self._format.decode:
            return repr(self._format)
        try:
            key = key_of(decode)
        except Exception as error:  # pickling calls methods of any objects
            problem = f"cannot be pickled ({error}), so no cache can tell its results from those of another function"
            raise ConfigError("decode", f"{problem}; let it refer only to objects that can be pickled") from error
        return f"{self._format!r} {key}"

    @property
    def least_window(self) -> int:
        """1 for files of one sample, as the order shuffles files; else a few rows."""
        return 1 if self._format.whole else _LEAST_WINDOW

    def nbytes(self, columns: Sequence[str]) -> int:
        """Estimate the bytes from the first sample."""
        each = sum(self._row_bytes[name].nbytes for name in columns if name in self.schema.names)
        return int(each) * int(rows_in(self.row_groups).sum())

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Read and decode samples; raises `SourceError` naming the file, `DataError` naming the sample.

        Errors of the user's function are raised with a note that names the sample."""
        names, samples = [], []
        for name, sample in self._decoded(row_group):
            check_columns(sample, name, self.schema, columns)
            names.append(name)
            samples.append(sample)
        return columns_of(samples, names, pa.schema([self.schema.field(column) for column in columns]))

    def contents(self, row_groups: Sequence[RowGroup]) -> Sequence[bytes | None]:
        """See `Source.contents`; None for large row groups, and for files that have changed."""
        found: list[bytes | None] = [None] * len(row_groups)
        if self._files.local and len(row_groups) > 1:
            spans = [(group.file, *self._span(group)) for group in row_groups]
            parts = [(file, first, file.size if last < 0 else last) for file, first, last in spans]
            small = [place for place, (_, first, last) in enumerate(parts) if last - first <= _SMALL_BYTES]
            for place, content in zip(small, self._files.read_each([parts[place] for place in small]), strict=True):
                found[place] = content
        return found

    def columns(
        self, row_group: RowGroup, fields: Sequence[Field], content: bytes | None = None
    ) -> dict[str, ValuesOrLoose]:
        """Decode and convert samples, read here unless `contents` has; raises as `read` and `Field.values` do.

        Most columns are converted without Arrow, which would add a sixth of the time of decoding a small image."""
        kinds = {field.name: self.schema.field(field.name) for field in fields}
        stacks = {
            field.name: Stack(kinds[field.name])
            for field in fields
            if isinstance(field, Arrays) and pa.types.is_fixed_size_list(kinds[field.name].type)
        }
        names: list[str] = []
        others: dict[str, list[object]] = {field.name: [] for field in fields if field.name not in stacks}
        for name, sample in self._decoded(row_group, content):
            check_columns(sample, name, self.schema, kinds)
            names.append(name)
            for column, stack in stacks.items():
                stack.add(sample[column], name)
            for column, values in others.items():
                values.append(sample[column])
        return {
            field.name: stacks[field.name].rows()
            if field.name in stacks
            else self._converted(field, others[field.name], names, kinds[field.name])
            for field in fields
        }

    def _converted(self, field: Field, values: Sequence[object], names: Sequence[str], kind: pa.Field) -> Values:
        numbers = numbers_of(values, kind.type) if isinstance(field, Numbers) else None
        if numbers is not None:
            return numbers
        return field.values(pa.chunked_array([column_of(values, names, kind)]))

    def check(self) -> None:
        """Do nothing: each file is checked when it is read."""

    def recheck(self) -> None:
        """Check all files of known size; raises `SourceError` for one that has changed or vanished."""
        self._files.check([file for file in self._listed if file.size >= 0])

    def _decoded(self, row_group: RowGroup, content: bytes | None = None) -> Iterator[tuple[str, Mapping[str, object]]]:
        """Yield name and columns of each sample."""
        file, block, count = row_group.file, self._block(row_group), 0
        data = self._bytes(file, *self._span(row_group)) if content is None else content
        if self._packed(file):
            data = unpack(data, file.path)[block.first :]
        for name, sample in self._format.samples(data, file.path, block):
            try:
                decoded = self._decode(sample)
            except DataError as error:
                raise DataError(error.column, f"{name}: {error.problem}") from error
            except Exception as error:
                error.add_note(f"in decoding {name}")
                raise
            count += 1
            yield name, decoded
        if count != row_group.rows:
            problem = f"block {row_group.number} has {count} samples, and had {row_group.rows} when it was opened"
            raise SourceError(row_group.file.path, f"{problem}; has the file changed?")

    def _block(self, row_group: RowGroup) -> Block:
        return self._blocks[row_group.file.path][row_group.number] if self._blocks else _WHOLE_FILE

    def _packed(self, file: File) -> bool:
        return not self._format.whole and is_packed(file.path)

    def _span(self, row_group: RowGroup) -> tuple[int, int]:
        """Return the first and last byte to read; the last is -1 for the file's end."""
        block = self._block(row_group)
        return (0, -1) if self._packed(row_group.file) else (block.first, block.last)

    def _bytes(self, file: File, first: int, last: int) -> bytes:
        if self._files.local:
            return self._files.read_here(file, first, last)
        with self._files.fetching(file) as opened:
            end = last if last >= 0 else max(file.size, _FIRST_BYTES if file.size < 0 else 0)
            opened.fetch(lambda: [Span(first, end)] if end else [])
            opened.stream.seek(first)
            data = bytes(opened.stream.read(None if last < 0 else last - first))
        if self._files.client is None:
            self._files.check([file])
        return data

    def _index(self, gather: Gather | None) -> Sequence[Sequence[Block]]:
        """Return the blocks of all files; with `gather`, ranks divide the files of a store."""

        def find(mine: Sequence[File]) -> list[list[Block]]:
            threads = MOST_IN_FLIGHT if self._files.client is not None else _OPENERS
            if any(map(self._packed, mine)):
                threads = _UNPACKERS
            with ThreadPoolExecutor(threads, thread_name_prefix="farandole-open") as pool:
                return list(pool.map(self._blocks_of, mine))

        return shared_out(self._listed, find, gather, shared=self._files.client is not None)

    def _blocks_of(self, file: File) -> list[Block]:
        if self._packed(file):
            content = unpack(self._bytes(file, 0, -1), file.path)
            blocks = self._format.blocks(io.BytesIO(content), file.path)
            return [Block(sum(block.rows for block in blocks), blocks[0].first)] if blocks else []
        if self._files.local:
            if file.size <= _WHOLE_BYTES:
                return self._format.blocks(io.BytesIO(self._files.read_here(file, 0, -1)), file.path)
            with self._files.reading(file), io.BufferedReader(io.FileIO(file.path), _BUFFER_BYTES) as stream:
                return self._format.blocks(stream, file.path)
        with self._files.fetching(file) as opened:
            if opened.far is not None:
                opened.fetch(lambda: [Span(0, file.size if file.size >= 0 else _FIRST_BYTES)])
                return self._format.blocks(io.BytesIO(opened.stream.read()), file.path)
            return self._format.blocks(io.BufferedReader(opened.stream), file.path)


def _is_named(path: str, where: Named | None) -> bool:
    if where is None:
        return True
    if callable(where):
        return bool(where(path))
    patterns = [where] if isinstance(where, str) else where
    return any(
        fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(posixpath.basename(path), pattern) for pattern in patterns
    )
