"""Local folder of a run on rank 0: the folder itself, or a copy of a folder in an object store."""

import tempfile
from pathlib import Path

import fsspec

from farandole.estimators.store import FilesystemStore
from farandole.estimators.trainers.mirror import Mirror

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
        self._here = None if store.is_local else tempfile.TemporaryDirectory(prefix="farandole-model-")
        self.path = Path(self._root if self._here is None else self._here.name)
        self.path.mkdir(parents=True, exist_ok=True)
        self._mirror = None
        if self._here is not None:
            self._mirror = Mirror(self.path, store, self._root)
            self._fetch(store, self._mirror)

    def push(self) -> None:
        """Upload new and changed files to the object store, and remove those that were removed locally."""
        if self._mirror is not None:
            self._mirror.update(last="checkpoint")

    def close(self) -> None:
        """Remove the local copy, if there is one."""
        if self._here is not None:
            self._here.cleanup()

    def _fetch(self, store: FilesystemStore, mirror: Mirror) -> None:
        if not store.exists(self._root):
            return
        for found in self._files.ls(self._root, detail=False):
            name = found.rpartition("/")[2]
            if name == "checkpoint" or name.startswith("model.ckpt-"):
                mirror.fetch(name)
