"""Adapter by which pyiceberg reads an Iceberg table's metadata through the file system that reads the data."""

import io
from typing import NoReturn

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile

from farandole.data.formats.file_systems import Files


class FsspecIO(FileIO):
    """Access of pyiceberg to `files`, for reading only."""

    def __init__(self, files: Files) -> None:
        super().__init__({})
        self._files = files

    def new_input(self, location: str) -> InputFile:
        """Return the file at a URL or path."""
        return _Input(location, self._files)

    def new_output(self, location: str) -> OutputFile:
        """Raise `PermissionError`."""
        _refuse(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Raise `PermissionError`."""
        _refuse(str(location))


class _Input(InputFile):
    def __init__(self, location: str, files: Files) -> None:
        super().__init__(location)
        self._files = files
        self._path = files.place(location)

    def __len__(self) -> int:
        return self._files.look([self._path])[0].size

    def exists(self) -> bool:
        return self._files.exists(self._path)

    def open(self, seekable: bool = True) -> InputStream:
        # Reads the whole file: pyiceberg reads metadata from beginning to end.
        return io.BytesIO(self._files.content(self._path))


def _refuse(location: str) -> NoReturn:
    raise PermissionError(f"{location}: farandole only reads tables")
