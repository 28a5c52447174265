"""Operations for TensorFlow, in eager mode, in functions and in graphs of TensorFlow 1."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import tensorflow as tf

from farandole.core import default
from farandole.core.operations import kinds
from farandole.core.operations.compression import Compressor, wire_op
from farandole.core.operations.reduction import Average, Reduction, Sum, choose_reduction
from farandole.core.plugins import Address, address_of
from farandole.core.process_sets.process_set import ProcessSet, global_process_set, membership_of
from farandole.errors import InvalidRequest
from farandole.tensorflow import gradients as _registered  # noqa: F401
from farandole.tensorflow import nodes
from farandole.tensorflow.compression import Compression
from farandole.tensorflow.naming import require_no_xla, wire_name
from farandole.tensorflow.place import size_op

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]

Dense: TypeAlias = tf.Tensor
Given: TypeAlias = tf.Tensor  # or tf.IndexedSlices, or a value that can be converted to a tensor


def allreduce(
    tensor: Given,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[tf.Tensor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Given:
    """Reduce `tensor` over all ranks; every rank gets the same result. See `farandole.core.operations.ops` for `op`.

    For `tf.IndexedSlices` the result is the slices of all ranks, with Sum and Average only. The average of integer
    slices is floating-point, as with `tf.truediv`. In eager mode it blocks until every rank has made the request. In a
    function or graph it does so when it runs, and other operations run meanwhile. All ranks must use the same names, in
    any order. Raises `tf.errors.InvalidArgumentError` for a request that is invalid on this rank,
    `FailedPreconditionError` if ranks make different requests or before `init()`, and `AbortedError` with a rank that
    is lost.
    """
    op = choose_reduction(op, average).op
    if isinstance(tensor, tf.IndexedSlices):
        _require_plain(op, prescale_factor, postscale_factor, name)
        with _on(device_sparse):
            return _reduce_slices([tensor], op, name, process_set, ignore_name_scope)[0]
    with _on(device_dense):
        reduction = Reduction(wire_op(compression, op, name), prescale_factor, postscale_factor)
        smaller, ctx = compression.compress(_dense(tensor, "allreduce", name))
        wire, at = _ask("allreduce", name, [smaller], process_set, ignore_name_scope)
        (reduced,) = nodes.collective(kinds.ALLREDUCE, [smaller], wire, at, reduction=reduction)
        return compression.decompress(reduced, ctx)


def grouped_allreduce(
    tensors: Sequence[Given],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[tf.Tensor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Given]:
    """Reduce several tensors together, as `allreduce`; none begins before all are requested on all ranks."""
    op = choose_reduction(op, average).op
    results: list[Given] = list(tensors)
    sparse = [place for place, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense = [place for place in range(len(tensors)) if place not in sparse]
    if sparse:
        _require_plain(op, prescale_factor, postscale_factor, name)
        with _on(device_sparse):
            given = [tensors[place] for place in sparse]
            slices = _reduce_slices(given, op, name, process_set, ignore_name_scope)
        for place, output in zip(sparse, slices, strict=True):
            results[place] = output
    if not dense:
        return results
    with _on(device_dense):
        reduction = Reduction(wire_op(compression, op, name), prescale_factor, postscale_factor)
        pairs = [compression.compress(_dense(tensors[place], "grouped_allreduce", name)) for place in dense]
        smaller = [tensor for tensor, _ in pairs]
        wire, at = _ask("grouped_allreduce", name, smaller, process_set, ignore_name_scope)
        reduced = nodes.collective(kinds.ALLREDUCE, smaller, wire, at, grouped=True, reduction=reduction)
        for place, output, (_, ctx) in zip(dense, reduced, pairs, strict=True):
            results[place] = compression.decompress(output, ctx)
    return results


def allgather(
    tensor: Dense,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Dense:
    """Concatenate the ranks' tensors by rank along the first dimension, which may differ between ranks."""
    tensor = _dense(tensor, "allgather", name)
    wire, at = _ask("allgather", name, [tensor], process_set, ignore_name_scope)
    return nodes.collective(kinds.ALLGATHER, [tensor], wire, at)[0]


def grouped_allgather(
    tensors: Sequence[Dense],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Dense]:
    """Gather several tensors together, as `allgather`; none begins before all are requested on all ranks."""
    if not tensors:
        return []
    given = [_dense(tensor, "grouped_allgather", name) for tensor in tensors]
    wire, at = _ask("grouped_allgather", name, given, process_set, ignore_name_scope)
    return nodes.collective(kinds.ALLGATHER, given, wire, at, grouped=True)


def broadcast(
    tensor: Dense,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Dense:
    """Return the tensor of rank `root_rank`; the ranks' shapes and dtypes must be equal."""
    tensor = _dense(tensor, "broadcast", name)
    wire, at = _ask("broadcast", name, [tensor], process_set, ignore_name_scope)
    return nodes.collective(kinds.BROADCAST, [tensor], wire, at, root=_place_of(root_rank, wire, process_set))[0]


def grouped_broadcast(
    tensors: Sequence[Dense],
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Dense]:
    """Broadcast several tensors together, as `broadcast`; none begins before all are requested on all ranks."""
    if not tensors:
        return []
    given = [_dense(tensor, "grouped_broadcast", name) for tensor in tensors]
    wire, at = _ask("grouped_broadcast", name, given, process_set, ignore_name_scope)
    return nodes.collective(
        kinds.BROADCAST, given, wire, at, grouped=True, root=_place_of(root_rank, wire, process_set)
    )


def alltoall(
    tensor: Dense,
    splits: object = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Dense | tuple[Dense, Dense]:
    """Send `splits[r]` rows to each rank r, in order, and return the received rows in rank order.

    Without `splits` every rank gets an equal part. With `splits` the result is a pair: the rows, and the number of rows
    from each rank."""
    tensor = _dense(tensor, "alltoall", name)
    wire, at = _ask("alltoall", name, [tensor], process_set, ignore_name_scope)
    received, counts = nodes.alltoall(tensor, _whole_numbers([] if splits is None else splits, wire), wire, at)
    return received if splits is None else (received, counts)


def reducescatter(
    tensor: Dense,
    device_dense: str = "",
    compression: Compressor[tf.Tensor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Dense:
    """Reduce `tensor` over all ranks (Average or Sum) and return this rank's rows of the result.

    If the rows do not divide evenly, the first ranks get one row more."""
    op = wire_op(compression, op, name, kinds.REDUCESCATTER)
    reduction = Reduction(op, prescale_factor, postscale_factor)
    with _on(device_dense):
        smaller, ctx = compression.compress(_dense(tensor, "reducescatter", name))
        wire, at = _ask("reducescatter", name, [smaller], process_set, ignore_name_scope)
        (rows,) = nodes.collective(kinds.REDUCESCATTER, [smaller], wire, at, reduction=reduction)
        return compression.decompress(rows, ctx)


def grouped_reducescatter(
    tensors: Sequence[Dense],
    device_dense: str = "",
    compression: Compressor[tf.Tensor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Dense]:
    """Scatter several tensors together, as `reducescatter`; none begins before all are requested on all ranks."""
    if not tensors:
        return []
    op = wire_op(compression, op, None, kinds.REDUCESCATTER)
    reduction = Reduction(op, prescale_factor, postscale_factor)
    with _on(device_dense):
        pairs = [compression.compress(_dense(tensor, "grouped_reducescatter", None)) for tensor in tensors]
        smaller = [tensor for tensor, _ in pairs]
        wire, at = _ask("grouped_reducescatter", None, smaller, process_set, False)
        rows = nodes.collective(kinds.REDUCESCATTER, smaller, wire, at, grouped=True, reduction=reduction)
        return [compression.decompress(output, ctx) for output, (_, ctx) in zip(rows, pairs, strict=True)]


def join() -> Dense:
    """Declare that this rank has no more data, and take part in the other ranks' operations until all have joined.

    Returns the rank that joined last. See `farandole.core.operations.ops.join`."""
    return nodes.join(address_of(global_process_set, "join"))


def barrier(process_set: ProcessSet = global_process_set) -> tf.Operation | None:
    """Block until every rank has called it; in a graph, return a node that does so."""
    return nodes.barrier("barrier", address_of(process_set, "barrier"))


def _dense(given: Given, kind: str, name: str | None) -> Dense:
    """Return `given` as a tensor; refuse those that consist of several."""
    if isinstance(given, (tf.RaggedTensor, tf.SparseTensor)):
        parts = "values and row_splits" if isinstance(given, tf.RaggedTensor) else "values and indices"
        text = f"a {type(given).__name__} cannot be sent; pass its {parts} one by one, or a dense tensor"
        raise _refused(InvalidRequest(kind if name is None else f"{kind}.{name}", text))
    return tf.convert_to_tensor(given)


def _ask(
    kind: str, name: str | None, tensors: list[Dense], process_set: ProcessSet, ignore_name_scope: bool
) -> tuple[str, Address]:
    """Return the name on the wire, and the address of the engine."""
    if tf.executing_eagerly():
        default.membership()  # a graph may run later, after init()
    else:
        require_no_xla(kind, name)
    wire = wire_name(kind, name, tensors, ignore_name_scope)
    try:
        return wire, address_of(process_set, wire)
    except InvalidRequest as error:
        raise _refused(error) from None


def _place_of(root_rank: int, wire: str, process_set: ProcessSet) -> int:
    if process_set is global_process_set:
        return root_rank
    try:
        return membership_of(process_set, wire).place_of(root_rank, wire)
    except InvalidRequest as error:
        raise _refused(error) from None


def _whole_numbers(splits: object, wire: str) -> Dense:
    """Return `splits` as int32; a number that does not fit becomes the nearest one, which the operation refuses."""
    given = tf.convert_to_tensor(splits, dtype_hint=tf.int32)
    if not given.dtype.is_integer:
        raise _refused(InvalidRequest(wire, f"splits must be integers, got {given.dtype.name}"))
    return tf.saturate_cast(given, tf.int32)


def _refused(error: InvalidRequest) -> Exception:
    """Return the error of TensorFlow for an invalid request, which the operation's kernel would raise too."""
    return tf.errors.InvalidArgumentError(None, None, str(error))  # type: ignore[no-any-return]


def _on(device: str) -> AbstractContextManager[object]:
    # `tf.device` takes more time than the rest of an operation.
    return tf.device(device) if device else nullcontext()


def _require_plain(op: int, prescale: float, postscale: float, name: str | None) -> None:
    """Raise `NotImplementedError` for an op or factors that slices do not support."""
    if op not in (Average, Sum):
        raise NotImplementedError("tf.IndexedSlices can be reduced with op=Average or op=Sum only; see sparse_as_dense")
    if prescale != 1.0 or postscale != 1.0:
        shown = "allreduce" if name is None else f"allreduce.{name}"
        raise NotImplementedError(f"'{shown}': prescale_factor and postscale_factor do not apply to tf.IndexedSlices")


def _reduce_slices(
    slices: Sequence[tf.IndexedSlices], op: int, name: str | None, process_set: ProcessSet, ignore_name_scope: bool
) -> list[tf.IndexedSlices]:
    """Gather the slices of all ranks for several tensors together. Users of slices add up rows with equal indices."""
    values, indices = ([tf.convert_to_tensor(getattr(each, part)) for each in slices] for part in ("values", "indices"))
    wire, at = _ask("allgather", None if name is None else f"{name}.slices", values, process_set, ignore_name_scope)
    if op == Average:
        size = size_op(at[1])
        # Each rank divides its own rows. Integers become floats first: a narrow integer may not hold the size.
        values = [each / tf.cast(size, each.dtype) for each in map(_as_floating, values)]
    gathered = nodes.collective(kinds.ALLGATHER, [*values, *indices], wire, at, grouped=True)
    return [
        tf.IndexedSlices(gathered[place], gathered[place + len(slices)], each.dense_shape)
        for place, each in enumerate(slices)
    ]


def _as_floating(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor in the dtype in which TensorFlow divides it: float32 or float64 for integers."""
    if tensor.dtype.is_floating or tensor.dtype.is_complex:
        return tensor
    return tf.cast(tensor, tf.float32 if tensor.dtype.size < 4 else tf.float64)
