"""Batches of a data module for a `KerasEstimator`: (inputs, labels, weights), as the model's `fit` takes them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from farandole.data import ShardBatch
from farandole.errors import ConfigError
from farandole.estimators.data_module import DataModule
from farandole.estimators.trainers.module_batches import RankLoader, endless, open_module
from farandole.estimators.trainers.run import Run

__all__ = ["KerasModule", "Parts"]


@dataclass(frozen=True, slots=True)
class Parts:
    """A batch: the model's inputs, one array per label, and a weight per row; None: all rows count the same."""

    inputs: Any
    labels: list[NDArray[Any]]
    weights: NDArray[Any] | None


class KerasModule:
    """A rank's data module, and its batches as the trainer takes them.

    With the weights that the loader yields, a step's gradient is the mean over all rows. Without them the batches of
    all ranks count the same."""

    _module: DataModule

    def __init__(self, kind: Callable[..., Any], run: Run, made: Callable[[ShardBatch, bool], Parts]) -> None:
        self._kind, self._run = kind, run
        self._loader = RankLoader(run.batches, run.steps, lambda batch: _loader_batch(made(batch, True)))
        held = run.validation_steps
        self._held = RankLoader(
            lambda epoch: run.validation_batches(), held, lambda batch: _loader_batch(made(batch, False))
        )

    @contextmanager
    def opened(self) -> Iterator[Parts]:
        """Keep the module open for `batches` and `validation`; yield its first batch, which `batches` yields again."""
        run = self._run
        with open_module(self._kind, run, self._loader, self._held if run.validation_steps else None) as self._module:
            self._loader.epoch = run.checkpoint.epoch
            train = endless(self._module.train_data)
            first = next(train)
            self._train = chain([first], train)
            yield self._read(first)

    def batches(self) -> Iterator[Parts]:
        """Yield the batches of the remaining epochs."""
        for epoch in self._run.epochs:
            self._loader.epoch = epoch
            yield from map(self._read, islice(self._train, self._run.steps))

    def validation(self) -> Iterator[Parts]:
        """Yield the batches for validation, again and again without end."""
        while True:
            yield from map(self._read, islice(endless(self._module.val_data), self._run.validation_steps))

    def _read(self, given: Any) -> Parts:
        if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
            raise ConfigError(
                "data_module", f"must give batches as (inputs, labels) or (inputs, labels, weights), got {type(given)}"
            )
        inputs, labels, *weights = keras.tree.map_structure(_array, tuple(given))
        listed = list(labels) if isinstance(labels, (tuple, list)) else [labels]
        names = self._run.plan.label_cols
        if len(listed) != len(names):
            raise ConfigError("data_module", f"gives {len(listed)} labels; label_cols {list(names)} need one each")
        if weights and not (isinstance(weights[0], np.ndarray) and weights[0].shape == listed[0].shape[:1]):
            raise ConfigError("data_module", "must give one weight per row, in one array")
        return Parts(inputs, listed, weights[0] if weights else None)


def _loader_batch(parts: Parts) -> tuple[Any, ...]:
    return parts.inputs, parts.labels[0] if len(parts.labels) == 1 else tuple(parts.labels), parts.weights


def _array(value: Any) -> NDArray[Any]:
    made: NDArray[Any] = value if isinstance(value, np.ndarray) else keras.ops.convert_to_numpy(value)
    return made
