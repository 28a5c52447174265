"""Operations of `farandole.core.operations.ops` for MXNet arrays, with the arguments of Horovod's binding.

`priority`, which orders operations in MXNet's engine, is ignored: all ranks run operations in the order of rank 0's
plans. Operations are not recorded by `mxnet.autograd`. Without `_async` they block until the result is there.
"""

from collections.abc import Sequence

import numpy as np

from farandole.core.operations.compression import CastCompressor, Compressor, Int8Compressor, NoneCompressor
from farandole.core.operations.compression import Compression as Compressors
from farandole.core.operations.ops import Operations
from farandole.core.operations.reduction import Average
from farandole.core.operations.requests import Requests
from farandole.core.process_sets.process_set import ProcessSet, global_process_set
from farandole.mxnet.adapter import Array, MxnetAdapter

_adapter = MxnetAdapter()
requests = Requests(_adapter)
_operations: Operations[Array] = Operations(requests)

Compression: Compressors[Array] = Compressors(
    none=NoneCompressor(),
    fp16=CastCompressor(_adapter, np.float16),
    int8=Int8Compressor(_adapter, np.float32),
)


def allreduce(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
    compression: Compressor[Array] | None = None,
) -> Array:
    """Reduce an array over all ranks; every rank gets the same result, in a new array.

    See `farandole.core.operations.ops` for `op` and the errors. Blocks until every rank has made the request."""
    return _operations.allreduce(tensor, average, name, compression, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Array:
    """Reduce an array over all ranks in place, and return it; as `allreduce`."""
    return _operations.allreduce_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
    compression: Compressor[Array] | None = None,
) -> list[Array]:
    """Reduce several arrays together, as `allreduce`; none begins before all are requested on all ranks."""
    return _operations.grouped_allreduce(
        tensors, average, name, compression, op, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[Array]:
    """Reduce several arrays together, in place, and return them; as `grouped_allreduce`."""
    return _operations.grouped_allreduce_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)


def allgather(
    tensor: Array, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Array:
    """Concatenate the ranks' arrays by rank along the first dimension, which may differ between ranks."""
    return _operations.allgather(tensor, name, process_set)


def grouped_allgather(
    tensors: Sequence[Array], name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Gather several arrays together, as `allgather`; none begins before all are requested on all ranks."""
    return _operations.grouped_allgather(tensors, name, process_set)


def broadcast(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Return a copy of the array of rank `root_rank`; the ranks' shapes and dtypes must be equal."""
    return _operations.broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Overwrite the array with the one of rank `root_rank`, and return it; as `broadcast`."""
    return _operations.broadcast_(tensor, root_rank, name, process_set)


def alltoall(
    tensor: Array,
    splits: object = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Array | tuple[Array, Array]:
    """Send `splits[r]` rows to each rank r, in order, and return the received rows in rank order.

    Without `splits` every rank gets an equal part. With `splits`, a list or an integer array, the result is a pair: the
    rows, and the number of rows from each rank."""
    return _operations.alltoall(tensor, splits, name, process_set)


def reducescatter(
    tensor: Array,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compressor[Array] | None = None,
) -> Array:
    """Reduce an array over all ranks (Average or Sum) and return this rank's rows of the result.

    If the rows do not divide evenly, the first ranks get one row more."""
    return _operations.reducescatter(tensor, name, compression, op, process_set, prescale_factor, postscale_factor)


def grouped_reducescatter(
    tensors: Sequence[Array],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compressor[Array] | None = None,
) -> list[Array]:
    """Scatter several arrays together, as `reducescatter`; none begins before all are requested on all ranks."""
    return _operations.grouped_reducescatter(
        tensors, name, compression, op, process_set, prescale_factor, postscale_factor
    )


# Horovod has none of these for MXNet; their arguments are those of the other bindings.
# Methods of Operations; tools/binding_operations.py writes all that follows.
allgather_async = _operations.allgather_async
allreduce_async = _operations.allreduce_async
allreduce_async_ = _operations.allreduce_async_
alltoall_async = _operations.alltoall_async
broadcast_async = _operations.broadcast_async
broadcast_async_ = _operations.broadcast_async_
grouped_allgather_async = _operations.grouped_allgather_async
grouped_allreduce_async = _operations.grouped_allreduce_async
grouped_allreduce_async_ = _operations.grouped_allreduce_async_
grouped_reducescatter_async = _operations.grouped_reducescatter_async
reducescatter_async = _operations.reducescatter_async

__all__ = [
    "Compression",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]
