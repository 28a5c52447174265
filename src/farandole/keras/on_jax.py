"""Keras' JAX backend: all gradients are reduced in one operation, as a compiled program orders several at will."""

from collections.abc import Sequence

import jax
import keras

import farandole.jax as hvd
from farandole.core.process_sets.process_set import ProcessSet
from farandole.keras.backend import Options, reduction_arguments, value_of

__all__ = ["allreduce", "divide", "hvd", "is_tensor", "reduce_each"]


def is_tensor(value: object) -> bool:
    """Return whether `value` is an array of JAX, traced or not, or a Keras variable."""
    return isinstance(value, (jax.Array, keras.Variable))


def reduce_each(
    tensors: Sequence[jax.Array], groups: Sequence[Sequence[int]] | None, name: str, options: Options
) -> list[jax.Array]:
    """Reduce all tensors in one operation; `groups` are ignored, as programs may start operations in any order.

    Blocks until every rank has made the request; in a compiled function it blocks when the function runs."""
    return hvd.grouped_allreduce(tensors, name=name, **reduction_arguments(options))


def divide(gradient: jax.Array, process_set: ProcessSet) -> jax.Array:
    """See `Backend`."""
    return gradient / (process_set.size() or 1)


def allreduce(tensor: jax.Array | keras.Variable, name: str | None, options: Options) -> jax.Array:
    """See `farandole.jax.allreduce`."""
    reduced: jax.Array = hvd.allreduce(value_of(tensor), name=name, **reduction_arguments(options))
    return reduced
