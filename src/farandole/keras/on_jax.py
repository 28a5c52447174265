"""Keras' JAX backend: all gradients are reduced in one operation, as a compiled program orders several at will."""

from collections.abc import Sequence

import jax
import keras

import farandole.jax as hvd
from farandole.keras.backend import Options

__all__ = ["allgather", "allreduce", "broadcast", "divide", "is_tensor", "reduce_each", "reducescatter"]


def is_tensor(value: object) -> bool:
    """Return whether `value` is an array of JAX, traced or not, or a Keras variable."""
    return isinstance(value, (jax.Array, keras.Variable))


def reduce_each(
    tensors: Sequence[jax.Array], groups: Sequence[Sequence[int]] | None, name: str, options: Options
) -> list[jax.Array]:
    """Reduce all tensors in one operation; `groups` are ignored, as programs may start operations in any order.

    Blocks until every rank has made the request; in a compiled function it blocks when the function runs."""
    return hvd.grouped_allreduce(
        tensors,
        op=options.reduction.op,
        name=name,
        compression=options.compression,
        prescale_factor=options.reduction.prescale,
        postscale_factor=options.reduction.postscale,
        process_set=options.process_set,
    )


def divide(gradient: jax.Array, number: int) -> jax.Array:
    """See `Backend`."""
    return gradient / number


def allreduce(tensor: jax.Array | keras.Variable, name: str | None, options: Options) -> jax.Array:
    """See `farandole.jax.allreduce`."""
    return hvd.allreduce(
        _plain(tensor),
        op=options.reduction.op,
        name=name,
        compression=options.compression,
        prescale_factor=options.reduction.prescale,
        postscale_factor=options.reduction.postscale,
        process_set=options.process_set,
    )


def allgather(tensor: jax.Array | keras.Variable, name: str | None) -> jax.Array:
    """See `farandole.jax.allgather`."""
    return hvd.allgather(_plain(tensor), name)


def broadcast(tensor: jax.Array | keras.Variable, root_rank: int, name: str | None) -> jax.Array:
    """See `farandole.jax.broadcast`."""
    return hvd.broadcast(_plain(tensor), root_rank, name)


def reducescatter(tensor: jax.Array | keras.Variable, name: str | None, op: int) -> jax.Array:
    """See `farandole.jax.reducescatter`."""
    return hvd.reducescatter(_plain(tensor), op=op, name=name)


def _plain(tensor: jax.Array | keras.Variable) -> jax.Array:
    value: jax.Array = tensor.value if isinstance(tensor, keras.Variable) else tensor
    return value
