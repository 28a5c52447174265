"""Local folders whose files a store gets, and copies of them in the store."""

import posixpath
import tempfile
from contextlib import suppress
from pathlib import Path

from farandole.closing import Closing
from farandole.estimators.store import FilesystemStore


class Mirror:
    """A copy of the local `folder` at `path` in a store. Files at `path` that were never in `folder` stay there."""

    def __init__(self, folder: Path, store: FilesystemStore, path: str) -> None:
        self._folder, self._store, self._path = folder, store, path
        self._copied: dict[str, tuple[int, int]] = {}  # modification time and size, by the path below the folder

    def update(self, *, last: str = "") -> None:
        """Copy new and changed files, `last` after the others; remove the copies of files that are gone."""
        now = self._files()
        changed = [name for name, mark in now.items() if self._copied.get(name) != mark]
        for name in sorted(changed, key=lambda name: (name == last, name)):
            self._store.write(posixpath.join(self._path, name), (self._folder / name).read_bytes())
        for name in self._copied.keys() - now.keys():
            with suppress(FileNotFoundError):  # somebody has removed the copy
                self._store.remove(posixpath.join(self._path, name))
        self._copied = now

    def fetch(self, name: str) -> None:
        """Copy a file from the store to the folder."""
        content = self._store.read(posixpath.join(self._path, name))
        assert content is not None
        (self._folder / name).write_bytes(content)
        self._copied[name] = _mark(self._folder / name)

    def _files(self) -> dict[str, tuple[int, int]]:
        files = [each for each in self._folder.rglob("*") if each.is_file()]
        return {each.relative_to(self._folder).as_posix(): _mark(each) for each in files}


class StoredFolder(Closing):
    """The local folder `path` for the files at `target` in a store: that folder itself, or a copy of a remote one.

    The copy is a new, empty folder. `close` removes it."""

    def __init__(self, store: FilesystemStore, target: str) -> None:
        self._copy = None if store.is_local else tempfile.TemporaryDirectory(prefix="farandole-store-")
        self.path = Path(target if self._copy is None else self._copy.name)
        self.mirror = None if self._copy is None else Mirror(self.path, store, target)

    def push(self, *, last: str = "") -> None:
        """Update the files in a remote store; see `Mirror.update`."""
        if self.mirror is not None:
            self.mirror.update(last=last)

    def close(self) -> None:
        """Remove the copy, if there is one."""
        if self._copy is not None:
            self._copy.cleanup()


def _mark(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_mtime_ns, facts.st_size
