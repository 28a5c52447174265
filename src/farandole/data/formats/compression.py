"""Unpacking of compressed files in memory, within a bound."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable

import pyarrow as pa

from farandole.errors import SourceError

MOST_BYTES = 1 << 30  # of one file, unpacked
_PIECE = 4 << 20  # bytes


# Arrow's streams of bz2 never end if there is nothing in them. It reads Zstandard, which Python has from 3.14 on.
_OPENERS: dict[str, Callable[[io.BytesIO], io.BufferedIOBase | pa.NativeFile]] = {
    ".gz": lambda packed: gzip.GzipFile(fileobj=packed),
    ".tgz": lambda packed: gzip.GzipFile(fileobj=packed),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda packed: pa.CompressedInputStream(packed, "zstd"),
}


def with_packed(*suffixes: str) -> tuple[str, ...]:
    """Return suffixes of plain files, and those of the same files compressed."""
    packed = [f"{suffix}{end}" for suffix in suffixes for end in (".gz", ".bz2", ".xz", ".zst")]
    return (*suffixes, *packed, *([".tgz"] if ".tar" in suffixes else []))


def is_packed(path: str) -> bool:
    """Return whether the suffix of a file names a compression."""
    return path.lower().endswith(tuple(_OPENERS))


def unpack(data: bytes, path: str) -> bytes:
    """Return the content of a compressed file, whose suffix names the compression.

    Raises `SourceError` for a file that is cut or damaged, and for more than `MOST_BYTES`."""
    opener = next(opener for suffix, opener in _OPENERS.items() if path.lower().endswith(suffix))
    if not data:
        raise SourceError(path, "is empty, so it is no compressed file")
    whole = io.BytesIO()
    try:
        stream = opener(io.BytesIO(data))
        while piece := stream.read(_PIECE):
            if whole.tell() + len(piece) > MOST_BYTES:
                problem = f"holds more than {MOST_BYTES} bytes, which are read at once"
                raise SourceError(path, f"{problem}; split or unpack it")
            whole.write(piece)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise SourceError(path, f"cannot be unpacked: {error}") from error
    return whole.getvalue()
