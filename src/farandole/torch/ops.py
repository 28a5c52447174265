"""Operations of `farandole.core.operations.ops` for torch tensors; blocking operations are differentiable."""

import torch

from farandole.core.operations.compression import BrainCompression, CastCompressor, Int8Compressor, NoneCompressor
from farandole.core.operations.ops import Operations
from farandole.torch.adapter import TorchAdapter, increment_versions
from farandole.torch.autograd import Differentiable

_adapter = TorchAdapter()
_operations: Operations[torch.Tensor] = Operations(Differentiable(_adapter), increment_versions)

requests = _operations.requests

Compression: BrainCompression[torch.Tensor] = BrainCompression(
    none=NoneCompressor(),
    fp16=CastCompressor(_adapter, torch.float16),
    bf16=CastCompressor(_adapter, torch.bfloat16),
    int8=Int8Compressor(_adapter, torch.float32),
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
