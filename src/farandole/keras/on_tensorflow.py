"""Keras' TensorFlow backend: gradients travel one by one as they become ready, unless they are to go in groups."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from farandole.core.gradients import Scaling
from farandole.keras.backend import How, Tensor
from farandole.tensorflow import ops as hvd

__all__ = ["allgather", "allreduce", "broadcast", "is_tensor", "reduce_each", "reducescatter"]


def is_tensor(value: object) -> bool:
    """Return whether `value` is a tensor, slices or a variable of TensorFlow or Keras."""
    return isinstance(value, (tf.Tensor, tf.IndexedSlices, tf.Variable, keras.Variable))


def reduce_each(tensors: Sequence[Tensor], groups: Sequence[Sequence[int]] | None, name: str, how: How) -> list[Tensor]:
    """Reduce each tensor on its own, or each group at once; slices as slices, unless they are to be dense.

    Eagerly it blocks until every rank has asked, and all are one group; in a function it does so when that runs."""
    given = [tf.convert_to_tensor(tensor) if how.sparse_as_dense else tensor for tensor in tensors]
    if groups is None and tf.executing_eagerly():
        groups = [range(len(given))]  # one after the other they would wait for each other
    if groups is None:
        return [
            hvd.allreduce(tensor, name=f"{name}.{place}", **_options(how, _scaling(how, tensor)))
            for place, tensor in enumerate(given)
        ]
    reduced = list(given)
    for number, group in enumerate(groups):
        # Slices take no factors, so they are a group of their own.
        for wire, alike in ((f"{name}.{number}", False), (f"{name}.{number}.slices", True)):
            places = [place for place in group if isinstance(given[place], tf.IndexedSlices) is alike]
            if places:
                tensors = [given[place] for place in places]
                outputs = hvd.grouped_allreduce(tensors, name=wire, **_options(how, _scaling(how, tensors[0])))
                for place, output in zip(places, outputs, strict=True):
                    reduced[place] = output
    return reduced


def allreduce(tensor: Tensor, name: str | None, how: How) -> Tensor:
    """As `farandole.tensorflow.allreduce`."""
    return hvd.allreduce(_plain(tensor), name=name, **_options(how, how.scaling))


def allgather(tensor: Tensor, name: str | None) -> Tensor:
    """As `farandole.tensorflow.allgather`."""
    return hvd.allgather(_plain(tensor), name=name)


def broadcast(tensor: Tensor, root_rank: int, name: str | None) -> Tensor:
    """As `farandole.tensorflow.broadcast`."""
    return hvd.broadcast(_plain(tensor), root_rank, name=name)


def reducescatter(tensor: Tensor, name: str | None, op: int) -> Tensor:
    """As `farandole.tensorflow.reducescatter`."""
    return hvd.reducescatter(_plain(tensor), name=name, op=op)


def _scaling(how: How, gradient: Tensor) -> Scaling:
    # Rows that are gathered cannot overflow as a sum can, so they need no factors.
    return Scaling() if isinstance(gradient, tf.IndexedSlices) else how.scaling


def _options(how: How, scaling: Scaling) -> dict[str, Any]:
    return {
        "compression": how.compression,
        "op": how.op,
        "prescale_factor": scaling.prescale,
        "postscale_factor": scaling.postscale,
        "process_set": how.process_set,
        # Keras' scopes tell how many layers and optimizers this rank has made before.
        "ignore_name_scope": True,
    }


def _plain(tensor: Tensor) -> Tensor:
    return tensor.value if isinstance(tensor, keras.Variable) else tensor
