"""Local folder of a run on rank 0: the folder itself, or a copy of a folder in an object store."""

import tempfile
from pathlib import Path

import fsspec

from farandole.spark.store import FilesystemStore

__all__ = ["ModelFolder", "local_path"]


def local_path(store: FilesystemStore) -> str:
    """Return the absolute path of a local store."""
    return str(fsspec.core.url_to_fs(store.prefix_path)[1])


class ModelFolder:
    """The local folder in which TensorFlow reads and writes; `push` uploads changes to an object store.

    The checkpoints in an object store are downloaded at the start. `push` uploads whole files, and the list of
    checkpoints last."""

    def __init__(self, store: FilesystemStore) -> None:
        self._files, self._root = fsspec.core.url_to_fs(store.prefix_path, **store.storage_options)
        self._store = store
        self._here = None if store.is_local else tempfile.TemporaryDirectory(prefix="farandole-model-")
        self.path = Path(self._root if self._here is None else self._here.name)
        self._pushed: dict[str, tuple[int, int]] = {}
        self.path.mkdir(parents=True, exist_ok=True)
        if self._here is not None:
            self._fetch()

    def push(self) -> None:
        """Upload new and changed files to the object store, and remove those that were removed locally."""
        if self._here is None:
            return
        now = {str(each.relative_to(self.path)): each.stat() for each in self.path.rglob("*") if each.is_file()}
        marks = {name: (stat.st_mtime_ns, stat.st_size) for name, stat in now.items()}
        changed = [name for name, mark in marks.items() if self._pushed.get(name) != mark]
        for name in sorted(changed, key=lambda name: (name == "checkpoint", name)):
            self._store.write(f"{self._root}/{name}", (self.path / name).read_bytes())
        for name in self._pushed.keys() - marks.keys():
            self._files.rm_file(f"{self._root}/{name}")
        self._pushed = marks

    def close(self) -> None:
        """Remove the local copy, if there is one."""
        if self._here is not None:
            self._here.cleanup()

    def _fetch(self) -> None:
        listed = self._store.read(f"{self._root}/checkpoint")
        if listed is None:
            return
        for found in self._files.ls(self._root, detail=False):
            name = found.rpartition("/")[2]
            if name == "checkpoint" or name.startswith("model.ckpt-"):
                content = self._store.read(found)
                assert content is not None
                (self.path / name).write_bytes(content)
                stat = (self.path / name).stat()
                self._pushed[name] = stat.st_mtime_ns, stat.st_size
