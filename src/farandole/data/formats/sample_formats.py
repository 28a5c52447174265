"""Formats of files that are not tables: whole files, lines of text or JSON, and members of tar shards."""

import codecs
import io
import json
import posixpath
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from farandole.data.formats.compression import with_packed
from farandole.data.formats.images import decode_image
from farandole.errors import DataError, SourceError

# Function from a sample, as its format yields it, to the sample's columns.
Sample: TypeAlias = dict[str, Any]
Decode: TypeAlias = Callable[[Sample], Mapping[str, object]]

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
# Samples, and bytes, after which a block ends.
_BLOCK_ROWS = 64
_BLOCK_BYTES = 4 << 20
# The same for members of shards that are as large as images: a decoded block takes many times its bytes.
_LARGE_ROWS, _LARGE_BYTES = 16, 128 << 10
_POSIX, _GNU = b"ustar\x0000", b"ustar  \0"  # in the headers of tar files
_NOTES = re.compile(r"(\./)?__[^/]*__(/|$)")  # members that WebDataset leaves out
_PIECE = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Block:
    """Samples of a file that are read together: `rows` samples in bytes `first` to `last` (-1: the file's end).

    `line` is the number of lines before them, in files of lines."""

    rows: int
    first: int = 0
    last: int = -1
    line: int = 0


@dataclass(frozen=True)
class Format(ABC):
    """Format in which files hold samples. Can be pickled.

    `suffixes` are those of its files, in lower case; empty: any. If `whole`, each file is one sample, and no file is
    opened to find samples."""

    suffixes: tuple[str, ...] = ()
    whole: bool = False

    @abstractmethod
    def blocks(self, stream: io.BufferedIOBase, path: str) -> list[Block]:
        """Return the blocks of a file's samples; raises `SourceError` naming the file."""

    @abstractmethod
    def samples(self, data: bytes, path: str, block: Block) -> Iterator[tuple[str, Sample]]:
        """Yield name and content of each sample in a block's bytes."""

    def decode(self, sample: Sample) -> Mapping[str, object]:
        """Return the columns of a sample, by default its items; used if the user gives no function."""
        return sample


@dataclass(frozen=True)
class Whole(Format):
    """Each file is a sample: {"path": ..., "data": its bytes}."""

    whole: bool = True

    def blocks(self, stream: io.BufferedIOBase, path: str) -> list[Block]:
        """Return the only block."""
        return [Block(1)]

    def samples(self, data: bytes, path: str, block: Block) -> Iterator[tuple[str, Sample]]:
        """Yield the file."""
        yield path, {"path": path, "data": data}


@dataclass(frozen=True)
class Images(Whole):
    """Each file is an image of the class that its folder names: {"path", "data", "label", "class"}.

    Columns are "image" and "label"."""

    classes: tuple[str, ...] = ()
    size: tuple[int, int] | None = None
    orient: bool = True
    suffixes: tuple[str, ...] = IMAGES

    def samples(self, data: bytes, path: str, block: Block) -> Iterator[tuple[str, Sample]]:
        """Yield the file, with its class's number as "label" and name as "class"."""
        name = posixpath.basename(posixpath.dirname(path))
        yield path, {"path": path, "data": data, "label": self.classes.index(name), "class": name}

    def decode(self, sample: Sample) -> Mapping[str, object]:
        """Return the image as uint8[height, width, 3], and its label."""
        image = decode_image(sample["data"], "image", self.size, orient=self.orient)
        return {"image": image, "label": sample["label"]}


@dataclass(frozen=True)
class Lines(Format):
    """Each line is a sample: {"text": ...}, without the line's end."""

    suffixes: tuple[str, ...] = with_packed(".txt", ".text")
    _advice: ClassVar = "text must be UTF-8"

    def blocks(self, stream: io.BufferedIOBase, path: str) -> list[Block]:
        """Cut the file at ends of lines; counts the lines that `samples` yields. A byte-order mark is left out."""
        found: list[Block] = []
        mark = stream.read(len(codecs.BOM_UTF8))
        first = place = len(mark) if mark == codecs.BOM_UTF8 else stream.seek(0)
        rows = before = 0
        for number, line in enumerate(stream, 1):
            place += len(line)
            rows += self._counts(line)
            if rows >= _BLOCK_ROWS * 16 or (rows and place - first >= _BLOCK_BYTES):
                found.append(Block(rows, first, place, before))
                first, rows, before = place, 0, number
        return [*found, Block(rows, first, place, before)] if rows else found

    def samples(self, data: bytes, path: str, block: Block) -> Iterator[tuple[str, Sample]]:
        """Yield the lines."""
        # Not `splitlines`, which also ends lines at other characters than line feeds.
        for number, line in enumerate(io.BytesIO(data), block.line + 1):
            if self._counts(line):
                try:
                    yield f"line {number} of {path}", self._parse(line.rstrip(b"\r\n").decode())
                except (ValueError, RecursionError) as error:
                    raise SourceError(path, f"line {number} cannot be read: {error}; {self._advice}") from error

    def _counts(self, line: bytes) -> bool:
        return True

    def _parse(self, line: str) -> Sample:
        return {"text": line}


@dataclass(frozen=True)
class Json(Lines):
    """Each line that is not empty is a sample, a JSON object."""

    suffixes: tuple[str, ...] = with_packed(".jsonl", ".ndjson", ".json")
    _advice: ClassVar = "each line must be a JSON object of few levels, in UTF-8"

    def _counts(self, line: bytes) -> bool:
        return bool(line.strip())

    def _parse(self, line: str) -> Sample:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError(f"it is a {type(found).__name__}")
        return found


@dataclass(frozen=True)
class Shards(Format):
    """Consecutive members of a tar file whose names agree up to the first dot are a sample.

    A sample is {"key": name, "jpg": bytes, "cls": bytes, ...}. Columns are "key" and the members' extensions: images as
    arrays, "cls" as an integer, "txt" and "text" as text, others as bytes."""

    suffixes: tuple[str, ...] = with_packed(".tar")
    size: tuple[int, int] | None = None
    orient: bool = True

    def blocks(self, stream: io.BufferedIOBase, path: str) -> list[Block]:
        """Cut the file between samples, by the headers of its members."""
        found: list[Block] = []
        first = end = rows = 0
        key = None
        for member, name, _ in self._members(stream, path):
            if name != key:
                nbytes = member.offset - first
                large = rows >= _LARGE_ROWS and nbytes >= _LARGE_BYTES
                if large or rows >= _BLOCK_ROWS or (rows and nbytes >= _BLOCK_BYTES):
                    found.append(Block(rows, first, member.offset))
                    first, rows = member.offset, 0
                key, rows = name, rows + 1
            end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        return [*found, Block(rows, first, end)] if rows else found

    def samples(self, data: bytes, path: str, block: Block) -> Iterator[tuple[str, Sample]]:
        """Yield the samples of a block, which begins with a member's header."""
        key = ""
        sample: Sample = {}
        for member, name, extension in self._members(io.BytesIO(data), path, part=True):
            if name != key and sample:
                yield f"{key} in {path}", sample
                sample = {}
            key = name
            if not sample:
                sample = {"key": name}
            if extension in sample:
                raise SourceError(path, f"has {member.name} twice in a sample")
            sample[extension] = data[member.offset_data : member.offset_data + member.size]
        if sample:
            yield f"{key} in {path}", sample

    def decode(self, sample: Sample) -> Mapping[str, object]:
        """Return the columns, named by the members' extensions."""
        made: Sample = {}
        for name, value in sample.items():
            if f".{name}" in IMAGES:
                made[name] = decode_image(value, name, self.size, orient=self.orient)
            elif name in ("cls", "txt", "text"):
                try:
                    made[name] = int(value) if name == "cls" else value.decode("utf-8-sig")
                except ValueError as error:
                    kind = "an integer" if name == "cls" else "UTF-8"
                    raise DataError(name, f"is not {kind}: {error}; read it with decode=") from error
            else:
                made[name] = value
        return made

    def _members(
        self, stream: io.BufferedIOBase, path: str, *, part: bool = False
    ) -> Iterator[tuple["_Member", str, str]]:
        """Yield each file of a tar file, or of a part of it, the name of its sample, and its extension."""
        try:
            for member in _tar_files(stream, part=part):
                folder, base = posixpath.split(member.name)
                stem, dot, extension = base.partition(".")
                if not base.startswith(".") and not _NOTES.match(member.name):
                    yield member, posixpath.join(folder, stem), extension.lower() if dot else "data"
        except tarfile.TarError as error:
            raise SourceError(path, f"cannot be read as a tar file: {error}") from error


@dataclass(frozen=True, slots=True)
class _Member:
    """A file in a tar file: the positions of its header and its data, and its size in bytes."""

    name: str
    offset: int
    offset_data: int
    size: int


def _tar_files(stream: io.BufferedIOBase, *, part: bool = False) -> Iterator[_Member]:
    """Yield the files of a tar stream, or of a part of one; folders are left out.

    Raises `tarfile.TarError` for bad headers, truncated data, a missing end unless it is a part, and members that have
    no data of their own. Reads plain headers itself, in a tenth of tarfile's time. tarfile reads from the first header
    of another kind on."""
    place = 0
    while (member := _plain_file(stream.read(tarfile.BLOCKSIZE), place)) is not None:
        yield member
        place = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        stream.seek(place)
    stream.seek(place)
    with tarfile.open(fileobj=stream, mode="r:") as rest:
        for entry in rest:
            if entry.size < 0 or entry.issparse():
                raise tarfile.ReadError(f"{entry.name} has {'a negative size' if entry.size < 0 else 'holes'}")
            if entry.isfile():
                yield _Member(entry.name, entry.offset, entry.offset_data, entry.size)
            elif not entry.isdir():
                kind = f"a link to {entry.linkname}" if entry.islnk() or entry.issym() else "neither file nor folder"
                remedy = "write files with their data: tar --dereference --hard-dereference"
                raise tarfile.ReadError(f"{entry.name} is {kind}; {remedy}")
        _check_end(stream, rest.offset, part=part)


def _check_end(stream: io.BufferedIOBase, place: int, *, part: bool) -> None:
    """Raise `tarfile.ReadError` unless the archive ends at byte `place`: tarfile reads any bad header as the end."""
    size = stream.seek(0, io.SEEK_END)
    if size < place:
        raise tarfile.ReadError(f"it ends at byte {size}, within the data of its last member")
    if size == place and not part:
        remedy = "if it is whole, append the end mark: head -c 1024 /dev/zero >> FILE"
        raise tarfile.ReadError(
            f"it ends at byte {size} without the mark of its end, so members may be missing; {remedy}"
        )
    stream.seek(place)
    header = stream.read(tarfile.BLOCKSIZE)
    if header and (len(header) < tarfile.BLOCKSIZE or any(header)):
        raise tarfile.ReadError(f"the header at byte {place} is cut or damaged")
    while piece := stream.read(_PIECE):
        if piece.strip(b"\0"):
            raise tarfile.ReadError("it has data after the mark of its end; join archives with tar --concatenate")


def _plain_file(header: bytes, place: int) -> _Member | None:
    """Return the file whose header, at byte `place`, is `header`; None for another kind of header, or no header."""
    try:
        size, checksum = (int(header[first:last].strip(b" \0"), 8) for first, last in ((124, 136), (148, 156)))
        name, prefix = (header[first:last].partition(b"\0")[0].decode() for first, last in ((0, 100), (345, 500)))
    except ValueError:
        return None
    magic = header[257:265]
    if len(header) < tarfile.BLOCKSIZE or header[156:157] not in (b"0", b"\0") or magic not in (_POSIX, _GNU):
        return None
    if size < 0 or (magic == _GNU and prefix):  # GNU's format has other fields in place of the prefix
        return None
    if sum(header) - sum(header[148:156]) + 8 * ord(" ") != checksum or name.endswith("/"):
        return None
    return _Member(f"{prefix}/{name}" if prefix else name, place, place + tarfile.BLOCKSIZE, size)


FORMATS: Mapping[str, Callable[[], Format]] = {
    "bytes": Whole,
    "images": Images,
    "jsonl": Json,
    "tar": Shards,
    "text": Lines,
}


def make_format(name: str, *, size: tuple[int, int] | None, orient: bool, classes: Sequence[str] = ()) -> Format:
    """Return a format of `FORMATS`; `size` and `orient` are those of its images, `classes` the names of their folders.

    Raises `KeyError` for an unknown name."""
    if name == "images":
        return Images(classes=tuple(classes), size=size, orient=orient)
    return Shards(size=size, orient=orient) if name == "tar" else FORMATS[name]()


def format_of(paths: Sequence[str]) -> str:
    """Return the format that the files' suffixes name; raises `DataError` if they name none, or several."""
    found = [name for name, kind in FORMATS.items() if any(path.lower().endswith(kind().suffixes) for path in paths)]
    if len(found) != 1:
        ends = {posixpath.splitext(path)[1].lower() for path in paths}
        raise DataError("", f"files end in {', '.join(sorted(ends)[:8])}; say format= one of {', '.join(FORMATS)}")
    return found[0]
