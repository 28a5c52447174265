"""What each of Keras' backends does its own way; which one it is, Keras decides when it is imported."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import keras

from farandole.core.compression import Compressor, NoneCompressor
from farandole.core.gradients import Scaling
from farandole.core.process_sets import ProcessSet, global_process_set
from farandole.core.reduction import Average

__all__ = ["Backend", "How", "Tensor", "backend", "compress_each"]

# Keras ships no types; a tensor is one of the backend's, in a traced function too.
Tensor: TypeAlias = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class How:
    """How tensors are reduced."""

    op: int = Average
    scaling: Scaling = field(default_factory=Scaling)
    compression: Compressor[Tensor] = field(default_factory=NoneCompressor)
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set


class Backend(Protocol):
    """One backend's tensors; a module of this package. All functions work wherever the backend's operations do."""

    def is_tensor(self, value: object) -> bool:
        """Return whether `value` is a tensor, or a variable, of the backend's framework."""

    def reduce_each(
        self, tensors: Sequence[Tensor], groups: Sequence[Sequence[int]] | None, name: str, how: How
    ) -> list[Tensor]:
        """Return the tensors, reduced over all ranks; `groups` are places of tensors that are reduced together.

        Without `groups`, what suits the backend is done. Blocks, if anything is done now and not only traced.
        """

    def allreduce(self, tensor: Tensor, name: str | None, how: How) -> Tensor:
        """Return the tensor, reduced over all ranks."""

    def allgather(self, tensor: Tensor, name: str | None) -> Tensor:
        """Return the ranks' tensors, one after the other."""

    def broadcast(self, tensor: Tensor, root_rank: int, name: str | None) -> Tensor:
        """Return the tensor of rank `root_rank`."""

    def reducescatter(self, tensor: Tensor, name: str | None, op: int) -> Tensor:
        """Return this rank's rows of the tensor, reduced over all ranks."""


def backend() -> Backend:
    """Return the backend that Keras has chosen, and import its framework's binding; no other one's.

    Raises `NotImplementedError` for a backend that trains nothing."""
    # Each knows its framework, which need not be installed, and takes seconds to import.
    match name := keras.backend.backend():
        case "torch":
            from farandole.keras import on_torch

            return on_torch
        case "tensorflow":
            from farandole.keras import on_tensorflow

            return on_tensorflow
        case "jax":
            from farandole.keras import on_jax

            return on_jax
    raise NotImplementedError(f"Keras runs on {name}; farandole.keras works on its tensorflow, torch and jax backends")


def compress_each(tensors: Sequence[Tensor], how: How) -> tuple[list[Tensor], list[object]]:
    """Return what is sent for the tensors, and what it takes to restore each."""
    pairs = [how.compression.compress(tensor) for tensor in tensors]
    return [tensor for tensor, _ in pairs], [ctx for _, ctx in pairs]
