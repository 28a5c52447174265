"""Keras' TensorFlow backend: each gradient is reduced when it is ready, or with the others of its group."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from farandole.core.process_sets.process_set import ProcessSet
from farandole.core.process_sets.registry import GLOBAL
from farandole.keras.backend import Options, Tensor, reduction_arguments, value_of
from farandole.tensorflow import ops as hvd
from farandole.tensorflow.place import size_op

__all__ = ["allreduce", "divide", "hvd", "is_tensor", "reduce_each"]


def is_tensor(value: object) -> bool:
    """Return whether `value` is a tensor, slices or a variable of TensorFlow or Keras."""
    return isinstance(value, (tf.Tensor, tf.IndexedSlices, tf.Variable, keras.Variable))


def reduce_each(
    tensors: Sequence[Tensor], groups: Sequence[Sequence[int]] | None, name: str, options: Options
) -> list[Tensor]:
    """Reduce each tensor on its own, or each group together; slices stay slices unless `sparse_as_dense` is set.

    In eager mode all tensors are one group by default, and it blocks until every rank has made the request. In a
    function it blocks when the function runs."""
    given = [tf.convert_to_tensor(tensor) if options.sparse_as_dense else tensor for tensor in tensors]
    if groups is None and tf.executing_eagerly():
        groups = [range(len(given))]  # several eager operations would block one after the other
    if groups is None:
        return [
            hvd.allreduce(tensor, name=f"{name}.{place}", **_arguments(options, tensor))
            for place, tensor in enumerate(given)
        ]
    reduced = list(given)
    for number, group in enumerate(groups):
        # Slices take no factors, so they are in a separate group.
        for wire, alike in ((f"{name}.{number}", False), (f"{name}.{number}.slices", True)):
            places = [place for place in group if isinstance(given[place], tf.IndexedSlices) is alike]
            if places:
                tensors = [given[place] for place in places]
                outputs = hvd.grouped_allreduce(tensors, name=wire, **_arguments(options, tensors[0]))
                for place, output in zip(places, outputs, strict=True):
                    reduced[place] = output
    return reduced


def divide(gradient: Tensor, process_set: ProcessSet) -> Tensor:
    """See `Backend`; slices stay slices. A function divides by the number of ranks when it runs."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(divide(gradient.values, process_set), gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size_op(process_set.process_set_id or GLOBAL), gradient.dtype)


def allreduce(tensor: Tensor, name: str | None, options: Options) -> Tensor:
    """See `farandole.tensorflow.allreduce`."""
    return hvd.allreduce(value_of(tensor), name=name, **_arguments(options, tensor))


def _arguments(options: Options, tensor: Tensor) -> dict[str, Any]:
    # Keras' scopes depend on how many layers and optimizers this rank has made.
    arguments = reduction_arguments(options) | {"ignore_name_scope": True}
    # Slices are gathered, not summed, so they cannot overflow and need no factors.
    no_factors = {"prescale_factor": 1.0, "postscale_factor": 1.0}
    return arguments | no_factors if isinstance(tensor, tf.IndexedSlices) else arguments
