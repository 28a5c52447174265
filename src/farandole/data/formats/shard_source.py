"""Source of the rows that one rank holds, in a memory-mapped file of Arrow IPC streams."""

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from farandole.data.formats.columns import check_names
from farandole.data.formats.row_groups import File, RowGroup, RowGroups
from farandole.data.formats.source import Source

# The file's mark, instead of its modification time: two ranks' files may have equal paths and sizes.
_OWN = "this rank's own"


class ShardSource(Source):
    """Uncompressed Arrow IPC streams in a file that only this rank has, and that no longer changes.

    Reading copies nothing. `FeedLoader` makes batches of the rows; `SelectedSource` chooses rows. Can be pickled for
    child processes of the rank, which can open the file as long as the rank lives.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        with pa.memory_map(self._path) as mapped:
            table = read_streams(mapped.read_buffer())
        self.schema = table.schema
        self._batches = table.to_batches()
        file = File(self._path, os.stat(self._path).st_size, _OWN)
        self.row_groups: Sequence[RowGroup] = tuple(
            RowGroup(file, number, batch.num_rows) for number, batch in enumerate(self._batches)
        )

    def __reduce__(self) -> tuple[type["ShardSource"], tuple[str]]:
        return ShardSource, (self._path,)

    def nbytes(self, columns: Sequence[str]) -> int:
        """Return the bytes of these columns in all record batches."""
        return sum(batch.column(name).nbytes for batch in self._batches for name in columns)

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Return views of these columns in the file; raises `DataError` for an absent one."""
        check_names(self.schema, columns)
        return pa.Table.from_batches([self._batches[row_group.number]], self.schema).select(list(columns))

    def check(self) -> None:
        """Do nothing: the file has no name, so nobody can change it."""


def is_own(source: Source) -> bool:
    """Return whether only one rank holds the rows of `source`."""
    groups = source.row_groups
    files = groups.files if isinstance(groups, RowGroups) else (group.file for group in groups)
    return any(file.mark == _OWN for file in files)


def read_streams(whole: pa.Buffer) -> pa.Table:
    """Read the consecutive Arrow IPC streams in `whole`; columns are views of it unless they are compressed."""
    rest = pa.BufferReader(whole)
    tables: list[pa.Table] = []
    while not tables or rest.tell() < whole.size:
        with pa.ipc.open_stream(rest) as stream:
            tables.append(stream.read_all())
    return pa.concat_tables(tables)
