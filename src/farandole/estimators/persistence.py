"""Saving and loading of estimators and fitted models, in the layout of pyspark.ml.

A saved object is a folder with `metadata/` (JSON: class, uid, plain parameters) and files: `parameters.pickle` of an
estimator, the framework's own file of a fitted model. The folder lies in any Hadoop file system of the session, or of
the server with Spark Connect.
"""

import importlib
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self, TypeAlias, TypeVar

import cloudpickle
import pyspark
from pyspark.ml.param import Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
from pyspark.resource import ExecutorResourceRequest, ResourceProfile, TaskResourceRequest

import farandole
from farandole.errors import ConfigError
from farandole.estimators.backend import SparkBackend
from farandole.estimators.folders import Folder, folder_of, overwrite
from farandole.estimators.portable import Portable
from farandole.estimators.store import FilesystemStore
from farandole.launch.pickling import dump

PARAMETERS = "parameters.pickle"  # the parameters of an estimator that JSON cannot hold
_METADATA = "metadata/part-00000"

Facts: TypeAlias = Mapping[str, Any]  # values of JSON
S = TypeVar("S", bound="Saved")


class Saved(Params, MLWritable, MLReadable["Saved"], Portable):
    """A `Params` object with `write`, `save`, `read` and `load`, and without Spark `to_files` and `from_files`.

    Loading unpickles: load only what you trust.
    """

    @abstractmethod
    def _contents(self) -> tuple[dict[str, object], dict[str, bytes]]:
        """Return the facts for the metadata, which JSON must hold, and the content of each file by its name."""

    @classmethod
    @abstractmethod
    def _revived(cls, facts: Facts, folder: Folder) -> Self:
        """Return the object that `_contents` described; the caller sets the parameters of the metadata."""

    def write(self) -> MLWriter:
        """Return the writer; `write().overwrite().save(path)` replaces what is at `path`."""
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader[Self]:
        """Return the reader."""
        return _Reader(cls)

    def to_files(self) -> dict[str, bytes]:
        """Return the files that `save` writes, by their paths in its folder, without Spark."""
        facts, files = self._contents()
        version = SimpleNamespace(version=pyspark.__version__)  # in place of the session
        metadata = DefaultParamsWriter._get_metadata_to_save(self, version, _extra(facts), _plain_values(self))  # type: ignore[arg-type]
        return {**files, _METADATA: metadata.encode() + b"\n", "metadata/_SUCCESS": b""}

    @classmethod
    def from_files(cls, read: Callable[[str], bytes]) -> Self:
        """Return the object of this class or a subclass whose files `read` returns by their paths.

        Raises `ConfigError` for an object of another class."""
        metadata = json.loads(read(_METADATA))
        module, _, name = metadata["class"].rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        if not issubclass(kind, cls):
            raise ConfigError("files", f"are those of a {metadata['class']}, not of a {_name_of(cls)}")
        made: Self = _restored(kind, metadata, _Files(read))
        return made


def is_plain(value: object) -> bool:
    """Return whether JSON can hold `value`: a number, a string, a flag, None, or a list of these."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(each) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))


class _Writer(MLWriter):
    def __init__(self, instance: Saved) -> None:
        super().__init__()
        self.instance = instance

    def _handleOverwrite(self, path: str) -> None:
        overwrite(self.sparkSession, path)

    def saveImpl(self, path: str) -> None:
        saved = self.instance
        facts, files = saved._contents()  # before anything is written, as pickling may fail
        spark = self.sparkSession
        DefaultParamsWriter.saveMetadata(saved, path, spark, extraMetadata=_extra(facts), paramMap=_plain_values(saved))
        folder = folder_of(spark, path)
        for name, content in files.items():
            folder.write(name, content)


class _Reader(MLReader[S]):
    def __init__(self, kind: type[S]) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> S:
        spark = self.sparkSession
        metadata = DefaultParamsReader.loadMetadata(path, spark)
        wanted = _name_of(self._kind)
        # Models of before version 0.2 name the modules of `farandole.spark` that are public names now.
        if metadata["class"].replace("farandole.spark.", "farandole.estimators.") != wanted:
            raise ConfigError("path", f"{path} holds a {metadata['class']}; load it with that class, not {wanted}")
        return _restored(self._kind, metadata, folder_of(spark, path))


@dataclass(frozen=True, slots=True)
class _Files:
    """A read-only `Folder` of files."""

    read: Callable[[str], bytes]

    def write(self, name: str, content: bytes) -> None:
        raise NotImplementedError(f"{name}: these files are read only")


def _extra(facts: dict[str, object]) -> dict[str, object]:
    return {"farandole": farandole.__version__, "facts": facts}


def _plain_values(instance: Params) -> dict[str, object]:
    return {param.name: value for param, value in instance._paramMap.items() if is_plain(value)}


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _restored(kind: type[S], metadata: Facts, folder: Folder) -> S:
    loaded = kind._revived(metadata["facts"], folder)
    loaded._resetUid(metadata["uid"])
    loaded._set(**metadata["paramMap"])
    return loaded


def dumped_parameters(instance: Params) -> bytes:
    """Pickle the parameters that JSON cannot hold as one object, store and backend without their secrets.

    Raises `PicklingError` that names the parameter that cannot be pickled."""
    values = {param.name: value for param, value in instance._paramMap.items() if not is_plain(value)}
    for name, value in values.items():
        if isinstance(value, FilesystemStore | SparkBackend):
            values[name] = value.without_secrets()
        if isinstance(value, ResourceProfile):
            values[name] = _SavedProfile(value.executorResources, value.taskResources)
    return dump(values, type(instance).__name__)


def loaded_parameters(content: bytes) -> dict[str, object]:
    """Unpickle the parameters that `dumped_parameters` returned."""
    values: dict[str, object] = cloudpickle.loads(content)
    return {name: each.profile() if isinstance(each, _SavedProfile) else each for name, each in values.items()}


@dataclass(frozen=True, slots=True)
class _SavedProfile:
    """The requests of a resource profile. The profile itself has a lock and may refer to the session's Java process."""

    executors: dict[str, ExecutorResourceRequest]
    tasks: dict[str, TaskResourceRequest]

    def profile(self) -> ResourceProfile:
        return ResourceProfile(_exec_req=self.executors, _task_req=self.tasks)
