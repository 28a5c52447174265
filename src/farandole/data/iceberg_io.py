"""Reading of Iceberg's metadata by pyiceberg through the file system that the data is read with."""

import io
from typing import NoReturn

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile

from farandole.data.file_systems import Files

__all__ = ["FsspecIO"]


class FsspecIO(FileIO):
    """Opens files of `files` for pyiceberg; refuses to write."""

    def __init__(self, files: Files) -> None:
        super().__init__({})
        self._files = files

    def new_input(self, location: str) -> InputFile:
        """Return the file at this URL or path."""
        return _Input(location, self._files)

    def new_output(self, location: str) -> OutputFile:
        """Refuse."""
        _refuse(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Refuse."""
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
        # Whole: pyiceberg reads metadata from its begin to its end.
        return io.BytesIO(self._files.content(self._path))


def _refuse(location: str) -> NoReturn:
    raise PermissionError(f"{location}: a table is only read here")
