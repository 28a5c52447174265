"""The operations as graph nodes, or run eagerly."""

import struct
from collections.abc import Sequence

import tensorflow as tf

from farandole.core.operations import kinds
from farandole.core.operations.reduction import Reduction
from farandole.core.plugins import Address
from farandole.tensorflow.plugin import operations


def collective(
    kind: int,
    tensors: Sequence[tf.Tensor],
    wire: str,
    at: Address,
    grouped: bool = False,
    reduction: Reduction | None = None,
    root: int = 0,
) -> list[tf.Tensor]:
    """Perform an operation over all ranks, in the inputs' memory if it keeps their shapes and nothing else uses them.

    Kinds that reduce need `reduction`, and those with a root need `root`, the root's index among the members.
    """
    attributes = _of(at)
    if reduction is not None:
        op, prescale, postscale = reduction
        attributes.update(op=op, prescale_bits=_bits(prescale), postscale_bits=_bits(postscale))
    if kind in kinds.ROOTED:
        attributes["root"] = root
    perform = getattr(operations(), f"farandole_{kinds.NAMES[kind]}")
    results = _independent(perform(tensors=tensors, tensor_name=wire, grouped=grouped, **attributes))
    return results if kind in kinds.KEEPING_SHAPE else _rows_like(results, tensors)


def alltoall(tensor: tf.Tensor, splits: tf.Tensor, wire: str, at: Address) -> tuple[tf.Tensor, tf.Tensor]:
    """Send rows to each rank. Return the received rows, and the number of rows from each rank."""
    received, counts = operations().farandole_alltoall(tensor=tensor, splits=splits, tensor_name=wire, **_of(at))
    _independent([received])
    _rows_like([received], [tensor])
    if not tf.executing_eagerly():
        counts.set_shape([None])
    return received, counts


def join(at: Address) -> tf.Tensor:
    """Take part in the other ranks' operations until all have joined; return the rank that joined last."""
    return operations().farandole_join(tensor_name="join.", **_of(at))


def barrier(wire: str, at: Address) -> tf.Operation | None:
    """Wait for all ranks. In a function it keeps its place in the order of operations."""
    return operations().farandole_barrier(tensor_name=wire, **_of(at))


def place(what: int, at: Address, name: str | None = None) -> tf.Tensor:
    """Return a number of this rank, such as its rank or the size, computed at run time."""
    number = operations().farandole_place(what=what, name=name, **_of(at))
    _independent([number])
    return number


def _of(at: Address) -> dict[str, int]:
    rank_id, process_set = at
    return {"rank_id": rank_id, "process_set": process_set}


def _bits(value: float) -> int:
    """Return the bits of a double as an integer, because TensorFlow's attributes cannot hold doubles."""
    (bits,) = struct.unpack("q", struct.pack("d", value))
    return int(bits)


def _independent(outputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Let an operation run in parallel with others; a function runs stateful operations in sequence by default."""
    outputs = list(outputs)
    if outputs and not tf.executing_eagerly():
        # Only FuncGraphs have an automatic-control-dependency manager.
        manager = getattr(tf.compat.v1.get_default_graph(), "experimental_acd_manager", None)
        if manager is not None:
            manager.run_independently(outputs[0].op)
    return outputs


def _rows_like(outputs: list[tf.Tensor], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Set the static shapes of `outputs` in a graph: all dimensions but the first are those of `inputs`."""
    if not tf.executing_eagerly():
        for output, given in zip(outputs, inputs, strict=True):
            if given.shape.rank:
                output.set_shape([None, *given.shape[1:]])
    return outputs
