"""Stores of checkpoints and logs: folders on a local or shared disk, or in an object store.

Layout: `<prefix>/runs/<run_id>/checkpoint` (the last finished epoch), `.../best` (the one that validated best) and
`.../logs/` (TensorBoard event files). `fit_on_parquet` reads `<prefix>/intermediate_train_data` and
`<prefix>/intermediate_val_data`. Each of these folders may have another path in the same file system.
"""

import logging
import os
import posixpath
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farandole.extras import importing

with importing("farandole.spark.store"):
    import fsspec
    from fsspec.implementations.local import LocalFileSystem


from farandole.errors import ConfigError
from farandole.estimators.whole_files import is_left, replace_local, unfinished_name
from farandole.file_errors import naming
from farandole.masking import hide_cause, mask, secret_values, without_secrets

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetDataset

log = logging.getLogger(__name__)

_DATABRICKS = "dbfs:/"
_MOUNT = "/dbfs"  # where Databricks mounts its file system on each machine
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")
_HDFS = "hdfs://"
_FOLDERS = ("train_path", "val_path", "test_path", "runs_path")
# File systems that show a file while it is written. Their clients can move a file over another one.
_SHOW_UNFINISHED = {"hdfs", "sftp"}


_REFUSED = {
    "get_data_metadata_path": "there is no file of metadata; the footers of Parquet files hold it",
    "parse_url": "storage_options holds the host and the port of the URL",
    "read_serialized_keras_model": "checkpoints are read with farandole's own classes; fit returns the Keras model",
    "to_remote": "ranks get the store itself, which can be pickled",
}


class Store:
    """Base of stores, and their factory."""

    @staticmethod
    def create(
        prefix_path: str, storage_options: Mapping[str, object] | None = None, **settings: Any
    ) -> "FilesystemStore":
        """Return the store under `prefix_path`; `settings` are further arguments of `FilesystemStore` or `HDFSStore`.

        Raises `ConfigError` when no installed file system serves the path."""
        make = HDFSStore if HDFSStore.matches(os.fspath(prefix_path)) else FilesystemStore
        return make(prefix_path, storage_options=dict(storage_options or {}), **settings)


@dataclass
class FilesystemStore(Store):
    """A store under a path or URL that fsspec understands: `/shared/runs`, `s3://bucket/runs`, `gs://...`.

    `train_path`, `val_path`, `test_path` and `runs_path` are folders in the same file system that take the place of
    those under the prefix; `checkpoint_filename` is the name of a run's checkpoint. A store can be pickled. Raises
    `ConfigError` when no installed file system serves the path, and for `save_runs=False`. Methods block for as long as
    the file system does and raise its errors.
    """

    prefix_path: str
    storage_options: Mapping[str, object] = field(default_factory=dict)
    train_path: str | None = None
    val_path: str | None = None
    test_path: str | None = None
    runs_path: str | None = None
    checkpoint_filename: str | None = None
    save_runs: InitVar[bool] = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({mask(self.prefix_path)!r})"

    def __post_init__(self, save_runs: bool) -> None:
        if not save_runs:
            raise ConfigError("save_runs", "runs are always kept in a store; fit without a store to keep none")
        given = os.fspath(self.prefix_path)
        try:
            files, root = fsspec.core.url_to_fs(
                given if self.storage_options else _mounted(given), **self.storage_options
            )
        except (ValueError, ImportError) as error:
            secrets = secret_values(self.storage_options)
            problem = mask(f"{self.prefix_path!r} cannot be opened: {error}", *secrets)
            raise ConfigError("store", problem) from hide_cause(error, *secrets)
        # Only the URL names the host or the account of Hadoop, SFTP and Azure; the path below does not.
        place = {} if "::" in given else files._get_kwargs_from_urls(given)
        self.storage_options = {**place, **self.storage_options}
        # Ranks have other working directories: a relative path must become absolute here, on the driver.
        self.prefix_path = files.unstrip_protocol(root)
        for name in _FOLDERS:
            if (folder := getattr(self, name)) is not None:
                setattr(self, name, files._strip_protocol(_mounted(os.fspath(folder))))

    if not TYPE_CHECKING:  # type checkers would take any name for an attribute

        def __getattr__(self, name: str) -> object:
            reason = f": {_REFUSED[name]}" if name in _REFUSED else ""
            raise AttributeError(f"{type(self).__name__} has no {name}{reason}", name=name, obj=self)

    def get_run_path(self, run_id: str) -> str:
        """Return the folder of one run; raises `ConfigError` unless `run_id` is a plain file name."""
        if not _RUN_ID.fullmatch(run_id):
            problem = f"{run_id!r} is no plain name: use letters, digits, '.', '_', '=', '+' and '-'"
            raise ConfigError("run_id", problem)
        return posixpath.join(self.get_runs_path(), run_id)

    def get_runs_path(self) -> str:
        """Return the folder that holds a folder for each run."""
        return self.runs_path or self._below("runs")

    def get_checkpoint_path(self, run_id: str) -> str:
        """Return the file that holds the last finished epoch of a run."""
        return posixpath.join(self.get_run_path(run_id), self.get_checkpoint_filename())

    def get_checkpoint_filename(self) -> str:
        """Return the name of the file that holds the last finished epoch."""
        return self.checkpoint_filename or "checkpoint"

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """Return the paths of the files in a run's folder that end with `suffix`, those of a `ModelCheckpoint` say."""
        folder = self.get_run_path(run_id)
        found = self._files().ls(folder, detail=False) if self.exists(folder) else []
        return sorted(each for each in found if each.endswith(suffix))

    def get_former_checkpoint_path(self, run_id: str) -> str:
        """Return the file that holds the epoch before the last finished one, in case the last file is damaged."""
        return f"{self.get_checkpoint_path(run_id)}.former"

    def get_best_path(self, run_id: str) -> str:
        """Return the file of the epoch with the smallest validation loss; it exists only with validation."""
        return posixpath.join(self.get_run_path(run_id), "best")

    def get_logs_path(self, run_id: str) -> str:
        """Return the folder of a run's event files."""
        return posixpath.join(self.get_run_path(run_id), self.get_logs_subdir())

    def get_logs_subdir(self) -> str:
        """Return the name of the folder of event files in a run's folder."""
        return "logs"

    def saving_runs(self) -> bool:
        """Return True: runs are always kept."""
        return True

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Return the folder of Parquet files that `fit_on_parquet` trains on."""
        return _numbered(self.train_path or self._below("intermediate_train_data"), idx)

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Return the folder of Parquet files that `fit_on_parquet` validates with."""
        return _numbered(self.val_path or self._below("intermediate_val_data"), idx)

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Return the folder for Parquet files of a program's tests; farandole neither reads nor writes it."""
        return _numbered(self.test_path or self._below("intermediate_test_data"), idx)

    def exists(self, path: str) -> bool:
        """Return whether `path` is a file or a folder."""
        files = self._files()
        files.invalidate_cache()  # it may not know files of other processes
        return bool(files.exists(path))

    def get_full_path(self, path: str) -> str:
        """Return the path as a URL with its scheme, as `url` does."""
        return self.url(path)

    def get_full_path_fn(self) -> Callable[[str], str]:
        """Return `get_full_path`."""
        return self.get_full_path

    def get_localized_path(self, path: str) -> str:
        """Return the path of a URL in the store's file system, without its scheme."""
        localized: str = self._files()._strip_protocol(_mounted(path))
        return localized

    def is_parquet_dataset(self, path: str) -> bool:
        """Return whether `path` is a Parquet file, or a folder of them."""
        try:
            self.get_parquet_dataset(path)
        except (OSError, ValueError):  # Arrow's errors for other files are ValueErrors
            return False
        return True

    def get_parquet_dataset(self, path: str) -> "ParquetDataset":
        """Return Arrow's `ParquetDataset` of a file or a folder."""
        from pyarrow.parquet import ParquetDataset  # it loads slowly, and fits do not need it

        return ParquetDataset(self.get_localized_path(path), filesystem=self._files())

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], AbstractContextManager[str]]:
        """Return a function that returns a context with a new local folder; `sync_fn` copies its files to the run."""
        self.get_run_path(run_id)
        return lambda: tempfile.TemporaryDirectory(prefix=f"{run_id}-")

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Return a function that copies the files below a local folder to the run's folder."""
        target = self.get_run_path(run_id)

        def sync(local: str) -> None:
            for each in sorted(Path(local).rglob("*")):
                if each.is_file():
                    self.write(posixpath.join(target, each.relative_to(local).as_posix()), each.read_bytes())

        return sync

    def copy(self, lpath: str, rpath: str, recursive: bool = False, **others: Any) -> None:
        """Copy a local file, or a folder if `recursive`, to `rpath` in the store; see `put` of fsspec."""
        self._files().put(lpath, rpath, recursive=recursive, **others)

    def write_text(self, path: str, text: str) -> None:
        """Replace the content of a file by a text, in UTF-8."""
        self.write(path, text.encode())

    @property
    def fs(self) -> fsspec.AbstractFileSystem:
        """The file system of fsspec."""
        return self._files()

    def get_filesystem(self) -> fsspec.AbstractFileSystem:
        """Return the file system of fsspec."""
        return self._files()

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether `Store.create` makes a store of this class for the path."""
        return not HDFSStore.matches(path)

    def url(self, path: str) -> str:
        """Return the path as a URL with its scheme, as Spark takes it."""
        found: str = self._files().unstrip_protocol(path)
        return found

    @property
    def root(self) -> str:
        """The path of the prefix, without the scheme of its URL."""
        path: str = self._files()._strip_protocol(self.prefix_path)
        return path

    def _below(self, name: str) -> str:
        return posixpath.join(self.root, name)

    @property
    def is_local(self) -> bool:
        """Return whether paths are those of this machine's own file system."""
        return isinstance(self._files(), LocalFileSystem)

    def without_secrets(self) -> "FilesystemStore":
        """Return a copy to be saved in a file, without the options whose names mark them as secret.

        Logs a warning if it leaves out an option. Raises `ConfigError` for a URL with credentials."""
        if mask(self.prefix_path) != self.prefix_path:
            raise ConfigError(
                "store",
                f"the URL {mask(self.prefix_path)} holds credentials, which are not written to a file; give "
                "them as storage_options, or by the environment",
            )
        kept = without_secrets(self.storage_options)
        if kept != dict(self.storage_options):
            log.warning("the store %r is saved without its secret options; set it again with setStore", self)
        return replace(self, storage_options=kept)

    def read(self, path: str) -> bytes | None:
        """Return a file's content, None when there is no such file."""
        try:
            content: bytes = self._files().cat_file(path)
        except FileNotFoundError:
            return None
        return content

    def write(self, path: str, content: bytes, *, former: str | None = None) -> None:
        """Replace the content of a file; keep the old content in the file `former` of the same folder, if it is given.

        After a crash it has the old or the new content on local disks, in object stores, and over SFTP. Hadoop's file
        system removes the old file right before it renames the new one. Others may keep a part of the new one. With
        `former` a crash may leave only that file. The file system's errors name `path`."""
        with naming(path):
            self._write(path, content, former)

    def _write(self, path: str, content: bytes, former: str | None) -> None:
        files = self._files()
        protocols = {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)
        if self.is_local:
            replace_local(Path(path), content, former)
        elif protocols & _SHOW_UNFINISHED:
            folder, name = posixpath.split(path)
            unfinished = posixpath.join(folder, unfinished_name(name))
            files.makedirs(folder, exist_ok=True)
            for each in files.ls(folder, detail=True):
                mark = each.get("mtime")
                if mark is not None and is_left(posixpath.basename(each["name"]), name, mark.timestamp()):
                    with suppress(FileNotFoundError):  # another writer has removed it
                        files.rm_file(each["name"])
            try:
                files.pipe_file(unfinished, content)
                if former is not None and files.exists(path):
                    files.mv(path, former)
                files.mv(unfinished, path)
            except Exception:
                with suppress(Exception):  # it may not be there, or the connection is lost
                    files.rm_file(unfinished)
                raise
        else:
            if former is not None:
                with suppress(FileNotFoundError):
                    files.cp_file(path, former)
            # An object store makes an upload visible once it is complete.
            files.pipe_file(path, content)

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._files().rm_file(path)

    def _files(self) -> fsspec.AbstractFileSystem:
        return fsspec.core.url_to_fs(self.prefix_path, **self.storage_options)[0]


LocalStore = DBFSLocalStore = AbstractFilesystemStore = FilesystemStore  # Horovod's names


class HDFSStore(FilesystemStore):
    """A store in Hadoop's file system: `hdfs://namenode:8020/user/me`, or `/user/me` on the cluster's default one.

    `user`, `kerb_ticket` and `extra_conf` are passed to its client. Raises `ConfigError` for the URL of another file
    system.
    """

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str | None = None,
        extra_conf: Mapping[str, str] | None = None,
        temp_dir: str | None = None,
        **settings: Any,
    ) -> None:
        named = {"driver": driver, "temp_dir": temp_dir}
        ignored = [name for name, value in named.items() if value is not None]
        if ignored:
            log.warning("%s of HDFSStore: no effect, libhdfs makes no temporary copies", " and ".join(ignored))
        client = {"host": host, "port": port, "user": user, "kerb_ticket": kerb_ticket, "extra_conf": extra_conf}
        options = {name: value for name, value in client.items() if value is not None}
        options.update(settings.pop("storage_options", None) or {})
        super().__init__(_in_hadoop(os.fspath(prefix_path)), options, **settings)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether the path is a URL of Hadoop's file system."""
        return path.startswith(_HDFS)


def _numbered(folder: str, idx: int | None) -> str:
    return folder if idx is None else f"{folder}.{idx}"


def _in_hadoop(path: str) -> str:
    if "://" in path and not path.startswith(_HDFS):
        raise ConfigError("store", f"{mask(path)!r} is not in Hadoop's file system; use Store.create")
    return path if path.startswith(_HDFS) else f"{_HDFS}/{path.lstrip('/')}"


def _mounted(path: str) -> str:
    """Return the path below Databricks' mount for a `dbfs:/` path; return other paths unchanged."""
    if not path.startswith(_DATABRICKS):
        return path
    if not os.path.isdir(_MOUNT):
        remedy = "give storage_options with instance and token, which fsspec's client needs"
        raise ConfigError("store", f"{path!r} lies in Databricks' file system, and {_MOUNT} is not there; {remedy}")
    return os.path.join(_MOUNT, path.removeprefix(_DATABRICKS).lstrip("/"))
