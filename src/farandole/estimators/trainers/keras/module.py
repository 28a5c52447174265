"""Batches of a data module for a `KerasEstimator`: (inputs, labels, weights), as the model's `fit` takes them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import keras
import numpy as np

from farandole.data import ShardBatch
from farandole.errors import ConfigError
from farandole.estimators.trainers.keras.model import Array
from farandole.estimators.trainers.module_batches import ModuleBatches
from farandole.estimators.trainers.run import Run


@dataclass(frozen=True, slots=True)
class Parts:
    """A batch: the model's inputs, one array per label, and a weight per row; None: all rows count the same."""

    inputs: object  # arrays in the structure of the model's inputs
    labels: Sequence[Array]
    weights: Array | None


class KerasModule(ModuleBatches):
    """A rank's data module, and its batches as the trainer takes them.

    With the weights that the loader yields, a step's gradient is the mean over all rows. Without them the batches of
    all ranks count the same."""

    def __init__(self, kind: Callable[..., object], run: Run, made: Callable[[ShardBatch, bool], Parts]) -> None:
        super().__init__(kind, run, lambda batch, training: _loader_batch(made(batch, training)))
        self._held_batches: Iterator[object] = iter(())
        self._next = 0  # index of the batch that `_held_batches` yields next

    def first(self) -> Parts:
        """Return the first batch, which `batches` yields again."""
        first = next(self._train)
        self._train = chain([first], self._train)
        return self._read(first)

    def batches(self) -> Iterator[Parts]:
        """Yield the batches of the remaining epochs."""
        for epoch in self._run.epochs:
            yield from map(self._read, self.given(epoch))

    def held(self, index: int) -> Parts:
        """Return a batch for validation; a pass over all of them begins with index 0."""
        if index == 0 or index != self._next:
            self._held_batches = islice(self.given_to_validate(), index, None)
        self._next = index + 1
        return self._read(next(self._held_batches))

    def _read(self, given: object) -> Parts:
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


def _loader_batch(parts: Parts) -> tuple[object, ...]:
    return parts.inputs, parts.labels[0] if len(parts.labels) == 1 else tuple(parts.labels), parts.weights


def _array(value: object) -> Array:
    made: Array = value if isinstance(value, np.ndarray) else keras.ops.convert_to_numpy(value)
    return made
