"""Summary files of Parquet data sets: `_metadata`, which holds the footers of all files of a folder."""

import logging
import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data.formats.file_systems import Files
from farandole.data.formats.places import inner_path
from farandole.data.formats.row_groups import File
from farandole.data.stores.ranges import Span
from farandole.masking import mask

log = logging.getLogger(__name__)

SUMMARY = "_metadata"
_END_BYTES = 12  # least bytes after a file's last column: the footer, its length (4 bytes) and the magic number (4)


@dataclass(frozen=True, slots=True)
class Footer:
    """The footer of one file: the `num_row_groups` row groups of `whole` that begin with number `first`."""

    whole: pq.FileMetaData
    first: int
    num_row_groups: int

    def row_group(self, number: int) -> pq.RowGroupMetaData:
        """Return the metadata of the file's row group `number`."""
        return self.whole.row_group(self.first + number)


@dataclass(frozen=True, slots=True)
class Summary:
    """The content `data` of the summary file `file` of `folder`."""

    file: File
    folder: str
    data: bytes


def find_beside(files: Files, folder: str, name: str) -> File | None:
    """Return the file `name` of `folder`; None if there is none. Makes a request, except of web servers.

    Raises the store's error, of any class."""
    if files.client is not None and files.web:
        return None
    path = f"{folder}/{name}"
    if files.client is not None:
        found = [file for file in files.client.first_page(path) if file.path == path]
    else:
        found = files.look([path]) if files.fs.exists(path) else []
    return found[0] if found else None


def content_of(files: Files, file: File) -> bytes:
    """Read the whole file."""
    with files.open(file) as opened:
        return bytes(opened.read())


def read_summary(files: Files, listed: Sequence[File]) -> Summary | None:
    """Return the summary in the common folder of the files `listed`; None if there is none. Makes 1 or 2 requests."""
    if len(listed) < 2:
        return None
    folder = posixpath.commonpath([posixpath.dirname(file.path) for file in listed])
    try:
        found = find_beside(files, folder, SUMMARY)
    except Exception as error:  # of any class; without access to the folder, the files may still be readable
        log.info("%s/%s cannot be looked for: %s", mask(folder), SUMMARY, mask(str(error)))
        return None
    return None if found is None else Summary(found, folder, content_of(files, found))


def footers_in(summary: Summary, listed: Sequence[File], *, local: bool) -> dict[str, Footer]:
    """Return the footers of the files that the summary describes, by path.

    Leaves out files that are too short for their footer and, on the local disk, files newer than the summary."""
    try:
        whole = pq.read_metadata(pa.BufferReader(summary.data))
    except pa.ArrowException as error:
        log.warning("%s is no summary of Parquet files and is not used: %s", mask(summary.file.path), error)
        return {}
    runs: dict[str, list[int]] = {}
    for number in range(whole.num_row_groups):
        runs.setdefault(str(whole.row_group(number).column(0).file_path), []).append(number)
    found = {}
    for file in listed:
        run = runs.get(inner_path(file.path, summary.folder), [])
        if not run or run[-1] - run[0] != len(run) - 1 or (local and float(file.mark) > float(summary.file.mark)):
            continue
        footer = Footer(whole, run[0], len(run))
        last = footer.row_group(footer.num_row_groups - 1)
        if max(span.last for span in spans_in(last, range(whole.num_columns))) + _END_BYTES <= file.size:
            found[file.path] = footer
    return found


def spans_in(row_group: pq.RowGroupMetaData, leaves: Iterable[int]) -> list[Span]:
    """Return the byte ranges of these columns' chunks in their file."""
    chunks = [row_group.column(leaf) for leaf in leaves]
    firsts = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]
    return [Span(first, first + chunk.total_compressed_size) for first, chunk in zip(firsts, chunks, strict=True)]
