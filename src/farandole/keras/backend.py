"""Interface of Keras' backends: `on_torch`, `on_tensorflow` and `on_jax` implement it."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import keras

from farandole.core.operations.gradients import GradientOptions
from farandole.core.process_sets.process_set import ProcessSet

# A tensor belongs to the backend's framework; in a traced function it is symbolic.
Tensor: TypeAlias = Any
# Of Keras 3, or their namesakes of tf_keras.
Model: TypeAlias = keras.Model
Optimizer: TypeAlias = keras.optimizers.Optimizer
Schedule: TypeAlias = keras.optimizers.schedules.LearningRateSchedule
Variable: TypeAlias = keras.Variable
Metric: TypeAlias = keras.metrics.Metric
Options: TypeAlias = GradientOptions[Tensor]


class Backend(Protocol):
    """A module of this package for the tensors of one backend, in eager code and in traced functions."""

    hvd: ModuleType  # the binding of the backend's framework

    def is_tensor(self, value: object) -> bool:
        """Return whether `value` is a tensor, or a variable, of the backend's framework."""

    def reduce_each(
        self, tensors: Sequence[Tensor], groups: Sequence[Sequence[int]] | None, name: str, options: Options
    ) -> list[Tensor]:
        """Return the tensors, reduced over all ranks; `groups` are places of tensors that are reduced together.

        Without `groups` the backend chooses them. Blocks unless it only traces.
        """

    def divide(self, gradient: Tensor, process_set: ProcessSet) -> Tensor:
        """Return a gradient, dense or sparse, divided by the number of ranks in a set of which this rank is one."""

    def allreduce(self, tensor: Tensor, name: str | None, options: Options) -> Tensor:
        """Return the tensor or variable, reduced over all ranks."""


def compress_each(tensors: Sequence[Tensor], options: Options) -> tuple[list[Tensor], list[object]]:
    """Return the compressed tensors, and for each the context that `decompress` takes."""
    pairs = [options.compression.compress(tensor) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [ctx for _, ctx in pairs]


def reduction_arguments(options: Options) -> dict[str, Any]:
    """Return the arguments of a binding's `allreduce` for `options`."""
    return {
        "op": options.reduction.op,
        "compression": options.compression,
        "prescale_factor": options.reduction.prescale,
        "postscale_factor": options.reduction.postscale,
        "process_set": options.process_set,
    }


def value_of(tensor: Tensor | Variable) -> Tensor:
    """Return the tensor that a Keras variable holds, and a tensor as it is."""
    return tensor.value if isinstance(tensor, keras.Variable) else tensor
