"""Where runs keep checkpoints and logs: a folder on a local or shared disk, or in an object store.

Layout: `<prefix>/runs/<run_id>/checkpoint` (the last finished epoch), `.../best` (the one that validated best) and
`.../logs/` (TensorBoard event files). There is no intermediate data.
"""

import logging
import os
import posixpath
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from farandole.extras import importing

with importing(__name__):
    import fsspec
    from fsspec.implementations.local import LocalFileSystem


from farandole.errors import ConfigError
from farandole.masking import hide_cause, mask, secret_values, without_secrets

log = logging.getLogger(__name__)

_DATABRICKS = "dbfs:/"
_MOUNT = "/dbfs"  # of Databricks' file system, on each of its machines
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")


@dataclass(frozen=True)
class FilesystemStore:
    """A store under a path or URL that fsspec understands: `/shared/runs`, `s3://bucket/runs`, `gs://...`.

    Can be pickled. Raises `ConfigError` when no installed file system serves the path; methods block for as long as the
    file system does and raise its errors.
    """

    prefix_path: str
    storage_options: Mapping[str, object] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({mask(self.prefix_path)!r})"

    def __post_init__(self) -> None:
        given = os.fspath(self.prefix_path)
        try:
            files, root = fsspec.core.url_to_fs(
                given if self.storage_options else _mounted(given), **self.storage_options
            )
        except (ValueError, ImportError) as error:
            secrets = secret_values(self.storage_options)
            problem = mask(f"{self.prefix_path!r} cannot be opened: {error}", *secrets)
            raise ConfigError("store", problem) from hide_cause(error, *secrets)
        # Ranks have other working directories: a relative path must become absolute here, on the driver.
        object.__setattr__(self, "prefix_path", files.unstrip_protocol(root))

    def get_run_path(self, run_id: str) -> str:
        """Return the folder of one run; raises `ConfigError` when `run_id` is no plain file name."""
        if not _RUN_ID.fullmatch(run_id):
            problem = f"{run_id!r} is no plain name: use letters, digits, '.', '_', '=', '+' and '-'"
            raise ConfigError("run_id", problem)
        root: str = self._files()._strip_protocol(self.prefix_path)
        return posixpath.join(root, "runs", run_id)

    def get_checkpoint_path(self, run_id: str) -> str:
        """Return the file that holds the last finished epoch of a run."""
        return posixpath.join(self.get_run_path(run_id), "checkpoint")

    def get_best_path(self, run_id: str) -> str:
        """Return the file that holds the epoch of a run that validated best; there is one only with validation."""
        return posixpath.join(self.get_run_path(run_id), "best")

    def get_logs_path(self, run_id: str) -> str:
        """Return the folder of a run's event files."""
        return posixpath.join(self.get_run_path(run_id), "logs")

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Return the folder of Parquet files that `fit_on_parquet` trains on."""
        return self._data_path("intermediate_train_data", idx)

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Return the folder of Parquet files that `fit_on_parquet` validates with."""
        return self._data_path("intermediate_val_data", idx)

    def exists(self, path: str) -> bool:
        """Return whether there is a file or a folder."""
        return bool(self._files().exists(path))

    def url(self, path: str) -> str:
        """Return the path with its scheme, as Spark takes it."""
        found: str = self._files().unstrip_protocol(path)
        return found

    def _data_path(self, name: str, idx: int | None) -> str:
        root: str = self._files()._strip_protocol(self.prefix_path)
        return posixpath.join(root, name if idx is None else f"{name}.{idx}")

    @property
    def is_local(self) -> bool:
        """Return whether paths are those of this machine's own file system."""
        return isinstance(self._files(), LocalFileSystem)

    def without_secrets(self) -> "FilesystemStore":
        """Return the store to keep in a file: without the options whose names say that they are secret.

        Logs a warning if some are left out. Raises `ConfigError` for a URL with credentials."""
        if mask(self.prefix_path) != self.prefix_path:
            raise ConfigError(
                "store",
                f"the URL {mask(self.prefix_path)} holds credentials, which are not written to a file; give "
                "them as storage_options, or by the environment",
            )
        kept = without_secrets(self.storage_options)
        if kept != dict(self.storage_options):
            log.warning("the store %r is saved without its secret options; give it anew with setStore", self)
        return replace(self, storage_options=kept)

    def read(self, path: str) -> bytes | None:
        """Return a file's content, None when there is no such file."""
        try:
            content: bytes = self._files().cat_file(path)
        except FileNotFoundError:
            return None
        return content

    def write(self, path: str, content: bytes) -> None:
        """Make `content` the file's content; a reader, and a crash in between, see the old one or the new one whole."""
        files = self._files()
        if not self.is_local:
            # Object stores show an upload once it is complete.
            files.pipe_file(path, content)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            with unfinished.open("wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)

    def upload(self, folder: Path, path: str) -> None:
        """Copy the files of a local folder to `path`."""
        for each in folder.iterdir():
            self.write(posixpath.join(path, each.name), each.read_bytes())

    def _files(self) -> fsspec.AbstractFileSystem:
        return fsspec.core.url_to_fs(self.prefix_path, **self.storage_options)[0]


LocalStore = HDFSStore = DBFSLocalStore = AbstractFilesystemStore = FilesystemStore  # Horovod's names


class Store:
    """Makes the store that fits a path."""

    @staticmethod
    def create(prefix_path: str, storage_options: Mapping[str, object] | None = None) -> FilesystemStore:
        """Return the store under `prefix_path`; raises `ConfigError` when no installed file system serves it."""
        return FilesystemStore(prefix_path, dict(storage_options or {}))


def _mounted(path: str) -> str:
    """Return the path below Databricks' mount of a `dbfs:/` path; others as they are."""
    if not path.startswith(_DATABRICKS):
        return path
    if not os.path.isdir(_MOUNT):
        remedy = "give storage_options with instance and token, which fsspec's client needs"
        raise ConfigError("store", f"{path!r} lies in Databricks' file system, and {_MOUNT} is not there; {remedy}")
    return os.path.join(_MOUNT, path.removeprefix(_DATABRICKS).lstrip("/"))
