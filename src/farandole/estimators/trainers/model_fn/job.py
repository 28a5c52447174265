"""Settings of a `HorovodEstimator`'s run, and the base class of the kinds of models that its loop trains."""

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import tensorflow as tf
from numpy.typing import NDArray

from farandole.closing import Closing
from farandole.data import Number
from farandole.estimators.store import FilesystemStore
from farandole.estimators.trainers.keras.model import DumpedModel
from farandole.estimators.trainers.model_fn.frozen_graph import FrozenGraph
from farandole.estimators.trainers.rows import RowsWanted

if TYPE_CHECKING:
    from tensorflow.compat.v1.summary import FileWriter

Batch: TypeAlias = tuple[dict[str, NDArray[Number]], NDArray[Number]]  # features by name, and labels
Batches: TypeAlias = Iterable[Batch]


@dataclass(frozen=True, kw_only=True)
class ModelFnJob:
    """The settings of a run; the same on every rank."""

    model_fn: Callable[..., object] | DumpedModel
    params: Mapping[str, object]
    features: Mapping[str, str]  # column -> key in `features`
    label_col: str
    rows: RowsWanted
    store: FilesystemStore  # the folder of checkpoints, event files and exports
    model_dir: str  # its path or URL, for the model function
    max_steps: int
    save_secs: float
    seed: int
    verbose: int
    owner: str = ""  # token of the fit that has locked the folder


@dataclass(frozen=True, kw_only=True)
class Table:
    """Types and widths of the columns, such as ("float32", None) for numbers and ("float32", 64) for arrays."""

    features: Mapping[str, tuple[str, int | None]]
    label: tuple[str, int | None]


class Program(Closing):
    """A model on one rank; a context. Creation, steps and evaluations are collectives."""

    def __init__(self, folder: Path | None) -> None:
        self._writers = Writers(folder)

    @property
    @abstractmethod
    def step(self) -> int:
        """Finished steps, counted over all runs in the folder."""

    @property
    @abstractmethod
    def stops(self) -> bool:
        """Return True once a hook or callback of this rank has requested the end of the training."""

    @abstractmethod
    def train(self, batch: Batch) -> float:
        """Take one step; return the loss of this rank's batch."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write a checkpoint; called on rank 0."""

    @abstractmethod
    def evaluate(self, folder: Path | None, batches: Batches) -> dict[str, object]:
        """Return the metrics of the last checkpoint over the batches of all ranks; rank 0 has the folder."""

    def log(self, folder: str, values: Mapping[str, float]) -> None:
        """Add a point to each curve of `folder`, "" for the training's own; called on rank 0."""
        self._writers.add(folder, values, self.step)

    @abstractmethod
    def export(self, folder: Path, to: Path) -> FrozenGraph:
        """Write the last checkpoint as a SavedModel into the new folder `to`; called on rank 0."""

    def close(self) -> None:
        """Close the writers. The end of a subclass's context ends hooks before, unless the training has failed."""
        self._writers.close()


class Writers:
    """One event file per subfolder of a run's folder, created at its first use and closed by `close`."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._files: dict[str, FileWriter] = {}

    def of(self, name: str) -> "FileWriter":
        """Return the `FileWriter` of the subfolder `name`; "" is the run's own folder."""
        assert self._folder is not None, "only rank 0 writes"
        if name not in self._files:
            with tf.Graph().as_default():  # a FileWriter cannot be created in eager mode
                # TensorFlow's own names are unique per second only, and a writer truncates a file of the same name.
                suffix = f".{os.getpid()}.{time.time_ns()}"
                self._files[name] = tf.compat.v1.summary.FileWriter(str(self._folder / name), filename_suffix=suffix)
        return self._files[name]

    def add(self, name: str, values: Mapping[str, float], step: int) -> None:
        """Add a point to each curve, and flush the file."""
        summary = tf.compat.v1.Summary
        points = [summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.of(name).add_summary(summary(value=points), step)
        self.of(name).flush()

    def close(self) -> None:
        """Close the files and end their threads."""
        for each in self._files.values():
            each.close()
