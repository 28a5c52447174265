"""Binding for TensorFlow, with Horovod's names.

import farandole.tensorflow as hvd
hvd.init()
tape = hvd.DistributedGradientTape(tape)
hvd.broadcast_variables(model.variables, root_rank=0)
"""

from farandole.core.public import *
from farandole.errors import HorovodInternalError
from farandole.extras import importing as _importing

with _importing("farandole.tensorflow"):
    from farandole.tensorflow.broadcasting import (
        BroadcastGlobalVariablesHook,
        broadcast_,
        broadcast_global_variables,
        broadcast_variables,
    )
    from farandole.tensorflow.compression import Compression
    from farandole.tensorflow.objects import allgather_object, broadcast_object, broadcast_object_fn
    from farandole.tensorflow.ops import (
        allgather,
        allreduce,
        alltoall,
        barrier,
        broadcast,
        grouped_allgather,
        grouped_allreduce,
        grouped_reducescatter,
        join,
        reducescatter,
    )
    from farandole.tensorflow.optimizer import DistributedOptimizer
    from farandole.tensorflow.place import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
    from farandole.tensorflow.sync_batch_norm import SyncBatchNormalization
    from farandole.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
    "sycl_built",
]
