"""Interface of Keras' backends: `on_torch`, `on_tensorflow` and `on_jax` implement it."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from farandole.core.operations.gradients import GradientOptions

__all__ = ["Backend", "Options", "Tensor", "compress_each"]

# Keras ships no types. A tensor belongs to the backend's framework; in a traced function it is symbolic.
Tensor: TypeAlias = Any
Options: TypeAlias = GradientOptions[Tensor]


class Backend(Protocol):
    """A module of this package for the tensors of one backend, in eager code and in traced functions."""

    def is_tensor(self, value: object) -> bool:
        """Return whether `value` is a tensor, or a variable, of the backend's framework."""

    def reduce_each(
        self, tensors: Sequence[Tensor], groups: Sequence[Sequence[int]] | None, name: str, options: Options
    ) -> list[Tensor]:
        """Return the tensors, reduced over all ranks; `groups` are places of tensors that are reduced together.

        Without `groups` the backend chooses them. Blocks unless it only traces.
        """

    def divide(self, gradient: Tensor, number: int) -> Tensor:
        """Return a gradient, dense or sparse, divided by a number."""

    def allreduce(self, tensor: Tensor, name: str | None, options: Options) -> Tensor:
        """Return the tensor, reduced over all ranks."""

    def allgather(self, tensor: Tensor, name: str | None) -> Tensor:
        """Return the ranks' tensors, concatenated by rank."""

    def broadcast(self, tensor: Tensor, root_rank: int, name: str | None) -> Tensor:
        """Return the tensor of rank `root_rank`."""

    def reducescatter(self, tensor: Tensor, name: str | None, op: int) -> Tensor:
        """Return this rank's rows of the tensor, reduced over all ranks."""


def compress_each(tensors: Sequence[Tensor], options: Options) -> tuple[list[Tensor], list[object]]:
    """Return the compressed tensors, and for each the context that `decompress` takes."""
    pairs = [options.compression.compress(tensor) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [ctx for _, ctx in pairs]
