"""Operations of `farandole.core.operations.ops` for NumPy arrays."""

import numpy as np

from farandole.core.operations.compression import CastCompressor, Int8Compressor, NoneCompressor
from farandole.core.operations.compression import Compression as Compressors
from farandole.core.operations.ops import Operations
from farandole.core.operations.requests import Requests
from farandole.numpy.adapter import Array, NumpyAdapter

_adapter = NumpyAdapter()
_operations: Operations[Array] = Operations(Requests(_adapter))

Compression: Compressors[Array] = Compressors(
    none=NoneCompressor(),
    fp16=CastCompressor(_adapter, np.dtype(np.float16)),
    int8=Int8Compressor(_adapter, np.dtype(np.float32)),
)

# Methods of Operations; tools/binding_operations.py writes all that follows.
allgather = _operations.allgather
allgather_async = _operations.allgather_async
allreduce = _operations.allreduce
allreduce_ = _operations.allreduce_
allreduce_async = _operations.allreduce_async
allreduce_async_ = _operations.allreduce_async_
alltoall = _operations.alltoall
alltoall_async = _operations.alltoall_async
bind = _operations.bind
broadcast = _operations.broadcast
broadcast_ = _operations.broadcast_
broadcast_async = _operations.broadcast_async
broadcast_async_ = _operations.broadcast_async_
grouped_allgather = _operations.grouped_allgather
grouped_allgather_async = _operations.grouped_allgather_async
grouped_allreduce = _operations.grouped_allreduce
grouped_allreduce_ = _operations.grouped_allreduce_
grouped_allreduce_async = _operations.grouped_allreduce_async
grouped_allreduce_async_ = _operations.grouped_allreduce_async_
grouped_reducescatter = _operations.grouped_reducescatter
grouped_reducescatter_async = _operations.grouped_reducescatter_async
reducescatter = _operations.reducescatter
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
    "bind",
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
