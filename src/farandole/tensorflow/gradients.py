"""Gradients of the operations, as Horovod defines them.

The gradient of a reduction is that of the sum of the ranks' losses. Allgather and broadcast average the ranks'
gradients, and reducescatter with Sum multiplies by the number of ranks. Gradients communicate, so every rank has to
compute them. Their requests have the operation's name plus ".backward".

Tensors are compared with `tf.equal`: in a graph of TensorFlow 1, `==` and `!=` compare Python objects.
"""

import struct
from dataclasses import dataclass

import tensorflow as tf

from farandole.core.operations import kinds
from farandole.core.operations.reduction import LINEAR, Adasum, Average, Max, Min, Product, Reduction, Sum
from farandole.core.plugins import Address
from farandole.tensorflow import nodes
from farandole.tensorflow.naming import backward_name
from farandole.tensorflow.place import RANK, SIZE

__all__: list[str] = []

Gradients = list[tf.Tensor]


@dataclass(frozen=True)
class _Node:
    """The attributes of an operation that its gradient needs."""

    wire: str
    at: Address
    grouped: bool

    @classmethod
    def of(cls, op: tf.Operation) -> "_Node":
        name = op.get_attr("tensor_name")
        return cls(name.decode(), (op.get_attr("rank_id"), op.get_attr("process_set")), op.get_attr("grouped"))

    def reduce(self, tensors: Gradients, op: int, part: str = "", pre: float = 1.0, post: float = 1.0) -> Gradients:
        """Return `tensors` of the backward pass, reduced over the operation's ranks."""
        name, reduction = backward_name(self.wire, part), Reduction(op, pre, post)
        return nodes.collective(kinds.ALLREDUCE, tensors, name, self.at, self.grouped, reduction)

    def size(self) -> tf.Tensor:
        """Return the number of ranks as a tensor, which is computed at run time."""
        return nodes.place(SIZE, self.at)


def _double(bits: int) -> float:
    (value,) = struct.unpack("d", struct.pack("q", bits))
    return float(value)


def _factors(op: tf.Operation) -> tuple[float, float]:
    return _double(op.get_attr("prescale_bits")), _double(op.get_attr("postscale_bits"))


@tf.RegisterGradient("FarandoleAllreduce")  # type: ignore[untyped-decorator]
def _of_allreduce(op: tf.Operation, *grads: tf.Tensor) -> Gradients:
    node, how, (pre, post) = _Node.of(op), op.get_attr("op"), _factors(op)
    if how in LINEAR:
        return node.reduce(list(grads), how, "", pre, post)
    if how == Adasum:
        raise NotImplementedError("allreduce with op=Adasum has no gradient here; use tf.stop_gradient on its input")
    inputs = list(op.inputs)
    totals = node.reduce(list(grads), Sum, ".total")
    if how == Product:
        size = tf.cast(node.size(), tf.float64)
        factor = tf.pow(tf.constant(pre, tf.float64), size) * post
        return [
            total * others * tf.cast(factor, total.dtype)
            for total, others in zip(totals, _others_product(node, inputs), strict=True)
        ]
    shares = _extreme_share(node, inputs, how, pre)
    return [total * share * tf.cast(pre * post, total.dtype) for total, share in zip(totals, shares, strict=True)]


def _extreme_share(node: _Node, tensors: Gradients, op: int, prescale: float) -> Gradients:
    """Return this rank's share of the gradients of Min or Max, between 0 and 1 for each element.

    The ranks that hold the extreme value divide the gradient equally."""
    # A negative prescale factor exchanges the largest and the smallest value.
    chosen = op if prescale >= 0 else {Min: Max, Max: Min}[op]
    extremes = node.reduce(tensors, chosen, ".extreme")
    held = [
        tf.cast(tf.equal(tensor, extreme) | (tf.math.is_nan(tensor) & tf.math.is_nan(extreme)), tensor.dtype)
        for tensor, extreme in zip(tensors, extremes, strict=True)
    ]
    return [mine / all_of_them for mine, all_of_them in zip(held, node.reduce(held, Sum, ".held"), strict=True)]


def _others_product(node: _Node, tensors: Gradients) -> Gradients:
    """Return the products of the other ranks' tensors; zeros are handled."""
    zero = [tf.cast(tf.equal(tensor, 0), tensor.dtype) for tensor in tensors]
    filled = [tf.where(tf.equal(tensor, 0), tf.ones_like(tensor), tensor) for tensor in tensors]
    products = node.reduce(filled, Product, ".product")
    zeros = node.reduce(zero, Sum, ".zeros")
    # Without zeros, divide the product by this rank's value. A single zero is this rank's, or makes the result zero.
    return [
        tf.where(
            tf.equal(count, 0),
            product / own,
            tf.where(tf.equal(mine, 1) & tf.equal(count, 1), product, tf.zeros_like(product)),
        )
        for mine, own, product, count in zip(zero, filled, products, zeros, strict=True)
    ]


@tf.RegisterGradient("FarandoleAllgather")  # type: ignore[untyped-decorator]
def _of_allgather(op: tf.Operation, *grads: tf.Tensor) -> Gradients:
    node = _Node.of(op)
    averaged = node.reduce(list(grads), Average)
    # Each rank's rows begin where those of the ranks before it end.
    rows = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in op.inputs])
    (table,) = nodes.collective(kinds.ALLGATHER, [rows[tf.newaxis]], backward_name(node.wire, ".rows"), node.at)
    starts = tf.reduce_sum(table[: nodes.place(RANK, node.at)], axis=0)
    return [
        tf.ensure_shape(grad[starts[place] : starts[place] + rows[place]], tensor.shape)
        for place, (grad, tensor) in enumerate(zip(averaged, op.inputs, strict=True))
    ]


@tf.RegisterGradient("FarandoleBroadcast")  # type: ignore[untyped-decorator]
def _of_broadcast(op: tf.Operation, *grads: tf.Tensor) -> Gradients:
    node = _Node.of(op)
    is_root = tf.equal(nodes.place(RANK, node.at), op.get_attr("root"))
    # The zeros depend on the average, so that every rank also runs the second derivative.
    return [tf.where(is_root, average, tf.zeros_like(average)) for average in node.reduce(list(grads), Average)]


@tf.RegisterGradient("FarandoleReducescatter")  # type: ignore[untyped-decorator]
def _of_reducescatter(op: tf.Operation, *grads: tf.Tensor) -> Gradients:
    node, (pre, post) = _Node.of(op), _factors(op)
    joined = nodes.collective(kinds.ALLGATHER, list(grads), backward_name(node.wire), node.at, node.grouped)
    if op.get_attr("op") == Sum:
        size = tf.cast(node.size(), tf.float64) * (pre * post)
        return [grad * tf.cast(size, grad.dtype) for grad in joined]
    return joined if pre * post == 1.0 else [grad * tf.cast(pre * post, grad.dtype) for grad in joined]


@tf.RegisterGradient("FarandoleAlltoall")  # type: ignore[untyped-decorator]
def _of_alltoall(op: tf.Operation, grad: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, None]:
    at = (op.get_attr("rank_id"), op.get_attr("process_set"))
    back, _counts = nodes.alltoall(grad, op.outputs[1], backward_name(op.get_attr("tensor_name").decode()), at)
    # Rows beyond the splits were not sent; their gradient is zero.
    shape = tf.shape(op.inputs[0])
    unsent = tf.zeros(tf.concat([shape[:1] - tf.shape(back)[:1], shape[1:]], 0), grad.dtype)
    return tf.ensure_shape(tf.concat([back, unsent], 0), op.inputs[0].shape), None


for _plain in ("FarandoleJoin", "FarandolePlace", "FarandoleBarrier"):
    tf.no_gradient(_plain)
