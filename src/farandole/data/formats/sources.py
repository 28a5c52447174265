"""Sources of rows in Parquet and Arrow files."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

import pyarrow as pa

from farandole.data.formats.file_systems import Files, FilesSource, open_and_find
from farandole.data.formats.parquet_files import ParquetFiles
from farandole.data.formats.places import Places, texts_of
from farandole.data.formats.row_groups import File, RowGroup
from farandole.data.formats.schemas import one_schema, with_types
from farandole.data.formats.source import DerivedSource
from farandole.data.loading.agreement import Gather, from_first, place_in, together
from farandole.data.stores.urls import is_local
from farandole.data.tables.folders import LoggedSource, TableFolder, find_table
from farandole.data.tables.versions import at_version
from farandole.errors import ConfigError
from farandole.masking import mask


class ParquetSource(DerivedSource):
    """Rows of Parquet files: of one file, folder or glob, or a list of these; `options` are the file system's.

    Making a source reads all footers. Folders named "column=value" below the given one add a column. The folder of a
    Delta or Iceberg table, or of a Spark stream's output, is read as by `DeltaSource`, `IcebergSource` or
    `StreamSource`, at `version` or the newest version; a folder of Hugging Face's `save_to_disk` as by `SavedDataset`.
    A `FlyteDirectory` is read from its store, without a download. With `verify`, reading compares pages with their
    checksums, if they have any; a `SourceError` names the file of one that differs.
    With `gather`, an all-gather of objects, opening is collective: if it fails on one rank, all ranks raise. For a
    store, rank 0 lists the files, or reads the table's log, and each rank reads some of the footers. Raises
    `SourceError` for files that are not Parquet and for other tables. Columns that differ between files raise
    `DataError` when they are read.
    """

    def __init__(
        self,
        urls: Places,
        options: Mapping[str, object] | None = None,
        *,
        version: int | None = None,
        gather: Gather | None = None,
        verify: bool = False,
    ) -> None:
        super().__init__(_open(texts_of(urls), options, version, gather, verify=verify))

    def beside(self, name: str) -> bytes | None:
        """Return the content of the file `name` in the folder of the files; None if there is none, and for a table."""
        return self._source.beside(name) if isinstance(self._source, ParquetFiles) else None

    def at(self, version: int) -> "ParquetSource":
        """Return the same table at another version."""
        other = copy(self)
        DerivedSource.__init__(other, at_version(self._source, version))
        return other


def _open(
    urls: str | Sequence[str],
    options: Mapping[str, object] | None,
    version: int | None,
    gather: Gather | None,
    *,
    verify: bool,
) -> ParquetFiles | LoggedSource:
    def find(files: Files) -> tuple[TableFolder | None, list[File], str]:
        """Return a table's folder, or the files and their base; makes only requests that one rank can make for all."""
        table = find_table(urls, options, files)
        if table is None and version is not None:
            raise ConfigError("version", f"is that of a table, and {mask(str(urls))} is none")
        if table is not None:
            return table, [], ""
        return None, *Files.find(urls, ".parquet", options, opened=files)[1:]

    def open_all(gather: Gather | None) -> ParquetFiles | LoggedSource:
        opened, (table, listed, base) = open_and_find(urls, options, find, gather)
        files = replace(opened, verify=verify)
        if table is not None:
            open_table = partial(table.open, options, version, files)
            return open_table() if gather is None else from_first(open_table, gather, place_in(gather)[0])
        return ParquetFiles(files, listed, base, gather)

    if is_local(urls, options):
        return together(lambda: open_all(None), gather)
    return open_all(gather)


class ArrowSource(FilesSource):
    """Rows of Arrow IPC files (Feather version 2); record batches are the row groups. URLs are as for `ParquetSource`.

    Making a source reads all record batches, for their numbers of rows."""

    def __init__(self, urls: Places, options: Mapping[str, object] | None = None) -> None:
        self._files, self._listed, _ = Files.find(texts_of(urls), ".arrow", options)
        schemas, groups = [], []
        self._nbytes: dict[str, int] = {}
        for file in self._listed:
            with self._files.open(file) as opened, pa.ipc.open_file(opened) as reader:
                schemas.append(reader.schema)
                for number in range(reader.num_record_batches):
                    # The file's footer does not have the numbers of rows.
                    batch = reader.get_batch(number)
                    groups.append(RowGroup(file, number, batch.num_rows))
                    for name, column in zip(batch.schema.names, batch.columns, strict=True):
                        self._nbytes[name] = self._nbytes.get(name, 0) + column.nbytes
        self._schemas = {file.path: schema for file, schema in zip(self._listed, schemas, strict=True)}
        self._common = one_schema(self._listed, schemas)
        self.schema = self._common.schema
        self.row_groups: Sequence[RowGroup] = tuple(groups)

    def nbytes(self, columns: Sequence[str]) -> int:
        """Return the bytes of these columns in all record batches."""
        self._common.check(columns)
        return sum(self._nbytes.get(name, 0) for name in columns)

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """Read these columns; raises `SourceError` naming the file."""
        self._common.check(columns)
        places = [self._schemas[row_group.file.path].get_field_index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=sorted(places), use_threads=False)
        with self._files.open(row_group.file) as opened, pa.ipc.open_file(opened, options=options) as reader:
            table = pa.Table.from_batches([reader.get_batch(row_group.number)]).select(list(columns))
        self._files.check([row_group.file])
        return with_types(table, self.schema)
