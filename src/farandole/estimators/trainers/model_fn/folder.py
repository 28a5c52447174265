"""Local folder of a run on rank 0: the folder itself, or a copy of a folder in an object store."""

import fsspec

from farandole.estimators.store import FilesystemStore
from farandole.estimators.trainers.mirror import StoredFolder


def local_path(store: FilesystemStore) -> str:
    """Return the absolute path of a local store."""
    return str(fsspec.core.url_to_fs(store.prefix_path)[1])


class ModelFolder(StoredFolder):
    """The local folder in which TensorFlow reads and writes; `push` uploads whole files to an object store.

    The checkpoints in an object store are downloaded at the start."""

    def __init__(self, store: FilesystemStore) -> None:
        super().__init__(store, store.root)
        self.path.mkdir(parents=True, exist_ok=True)
        if self.mirror is None or not store.exists(store.root):
            return
        for found in store.fs.ls(store.root, detail=False):
            name = found.rpartition("/")[2]
            if name == "checkpoint" or name.startswith("model.ckpt-"):
                self.mirror.fetch(name)
