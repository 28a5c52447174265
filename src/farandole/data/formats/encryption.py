"""Refusal of encrypted Parquet files."""

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.errors import SourceError

_LENGTH_AND_MAGIC = 8  # bytes at a file's end
_SIGNATURE = 28  # bytes after a plain footer of a file with encrypted columns


def refuse_encrypted(stream: pa.NativeFile, footer: pq.FileMetaData, path: str) -> None:
    """Raise `SourceError`, naming the columns, if columns of a file are encrypted although its footer is not.

    Must precede any look at the footer's column chunks, and its pickling: Arrow ends the process at those."""
    stream.seek(stream.size() - _LENGTH_AND_MAGIC)
    length = int.from_bytes(stream.read(4), "little")
    if length - footer.serialized_size != _SIGNATURE:
        return
    leaves = [footer.schema.column(leaf).path for leaf in range(footer.num_columns)]
    hidden = dict.fromkeys(leaf.partition(".")[0] for leaf in leaves if not _readable(stream, footer, leaf))
    what = f"columns {', '.join(hidden)} are encrypted" if hidden else "its footer is signed with a key"
    raise SourceError(path, f"{what}; write what is to be read to a file without encryption")


def _readable(stream: pa.NativeFile, footer: pq.FileMetaData, leaf: str) -> bool:
    try:
        with pq.ParquetFile(stream, metadata=footer, buffer_size=1 << 12) as parquet:
            next(parquet.iter_batches(1, row_groups=range(footer.num_row_groups), columns=[leaf]), None)
    except OSError as error:
        if "crypt" not in str(error):  # Arrow has no class for it
            raise
        return False
    return True
