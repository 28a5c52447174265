"""PyTorch binding, with the names of Horovod's API.

import farandole.torch as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)"""

from farandole.core.operations.handle import Handle, poll, synchronize
from farandole.core.operations.objects import allgather_object, broadcast_object
from farandole.core.operations.ops import barrier, join
from farandole.core.public import *
from farandole.errors import HorovodInternalError
from farandole.extras import importing as _importing

with _importing("farandole.torch"):
    from farandole.torch.ops import (
        Compression,
        allgather,
        allgather_async,
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        alltoall,
        alltoall_async,
        broadcast,
        broadcast_,
        broadcast_async,
        broadcast_async_,
        grouped_allgather,
        grouped_allgather_async,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_allreduce_async,
        grouped_allreduce_async_,
        grouped_reducescatter,
        grouped_reducescatter_async,
        reducescatter,
        reducescatter_async,
    )
    from farandole.torch.optimizer import DistributedOptimizer
    from farandole.torch.own_gpu import prefer_own_gpu as _prefer_own_gpu
    from farandole.torch.shared import empty_shared
    from farandole.torch.sparse import sparse_allreduce_async
    from farandole.torch.state import broadcast_optimizer_state, broadcast_parameters
    from farandole.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

_prefer_own_gpu()

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "convert_sync_batchnorm",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "empty_shared",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "sycl_built",
    "synchronize",
]
