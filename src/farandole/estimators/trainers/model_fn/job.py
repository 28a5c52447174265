"""Settings of a `HorovodEstimator`'s run, and the interface between its loop and the kinds of models."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from numpy.typing import NDArray

from farandole.data import Number
from farandole.estimators.store import FilesystemStore
from farandole.estimators.trainers.keras.model import DumpedModel
from farandole.estimators.trainers.model_fn.frozen_graph import FrozenGraph
from farandole.estimators.trainers.rows import RowsWanted

__all__ = ["Batch", "Batches", "ModelFnJob", "Program", "Table"]

Batch: TypeAlias = tuple[dict[str, NDArray[Number]], NDArray[Number]]  # features by name, and labels
Batches: TypeAlias = Iterable[Batch]


@dataclass(frozen=True, kw_only=True)
class ModelFnJob:
    """The settings of a run; the same on every rank."""

    model_fn: Callable[..., Any] | DumpedModel
    params: Mapping[str, Any]
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


class Program(Protocol):
    """A model on one rank. Creation, steps and evaluations are collectives."""

    @property
    def step(self) -> int:
        """Finished steps, counted over all runs in the folder."""

    @property
    def stops(self) -> bool:
        """Return True once a hook of this rank has requested the end of the training."""

    def train(self, batch: Batch) -> float:
        """Take one step; return the loss of this rank's batch."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint; called on rank 0."""

    def evaluate(self, folder: Path | None, batches: Batches) -> dict[str, Any]:
        """Return the metrics of the last checkpoint over the batches of all ranks; rank 0 has the folder."""

    def log(self, folder: str, values: Mapping[str, float]) -> None:
        """Add a point to each curve of `folder`, "" for the training's own; called on rank 0."""

    def export(self, folder: Path, to: Path) -> FrozenGraph:
        """Write the last checkpoint as a SavedModel into the new folder `to`; called on rank 0."""

    def __enter__(self) -> Self:
        """Return itself."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End hooks, unless the training has failed, and close the writers."""
