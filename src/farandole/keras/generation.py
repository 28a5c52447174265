"""Interface of the two generations of Keras: `keras_3` and `keras_2`, which is the package tf_keras, implement it."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

from farandole.keras.backend import Model, Optimizer, Options, Schedule, Variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How an optimizer reduces its gradients: once in `passes` passes, with the sums or their averages."""

    options: Options
    name: str | None
    groups: int | Iterable[Iterable[Variable]] | None
    scale_local: bool
    passes: int
    average: bool


class Generation(Protocol):
    """A module of this package for the optimizers, models and files of one generation of Keras."""

    has_legacy: bool  # has legacy optimizers, of an earlier generation
    library: ModuleType  # keras or tf_keras
    KINDS: tuple[type, ...]  # base classes of its optimizers

    def distribute(self, optimizer: Optimizer, how: Distribution) -> Optimizer:
        """Return an optimizer like `optimizer` that reduces its gradients.

        Raises `TypeError` for objects other than optimizers, and `ValueError` for an optimizer that is distributed
        already and for settings that it does not support."""

    def build(self, optimizer: Optimizer, trained: Sequence[Variable]) -> list[Variable]:
        """Make the optimizer's variables for the variables that it trains, if needed, and return all of them."""

    def has_schedule(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer's learning rate follows a schedule."""

    def rate(self, optimizer: Optimizer) -> Variable | Schedule:
        """Return the variable that holds the learning rate of a built optimizer, or the schedule."""

    def set_schedule(self, optimizer: Optimizer, schedule: Schedule) -> None:
        """Replace the schedule of the learning rate."""

    def velocities(self, optimizer: Optimizer) -> list[Variable]:
        """Return the variables that hold an optimizer's accumulated steps: those of SGD and RMSprop with momentum.

        The momentum of other optimizers is a mean of gradients and does not contain the rate."""

    def sums(self, optimizer: Optimizer) -> list[Variable]:
        """Return those of a built optimizer's variables that hold the gradients of the passes of an unfinished step."""

    def drop_sums(self, optimizer: Optimizer) -> None:
        """Drop the sums of the passes of an unfinished step that are not among the optimizer's variables."""

    def load(self, filepath: str | Path, objects: Mapping[str, object]) -> Model:
        """Load a saved model with its optimizer's state; `objects` are custom objects by name."""


def generation_of(value: object) -> Generation:
    """Return the generation of an optimizer or a model; Keras 3 for other objects."""
    return _generation(type(value))


def generation_of_files() -> Generation:
    """Return the generation of `tf.keras` if TensorFlow has been imported, else Keras 3."""
    tensorflow = sys.modules.get("tensorflow")
    return _generation(object if tensorflow is None else tensorflow.keras.Model)


def _generation(kind: type) -> Generation:
    is_keras_2 = any(each.__module__.partition(".")[0] == "tf_keras" for each in kind.__mro__)
    # By name and late: keras_2 needs TensorFlow, and both import modules that use this one.
    return cast(Generation, import_module(f"farandole.keras.{'keras_2' if is_keras_2 else 'keras_3'}"))
