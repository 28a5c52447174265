"""Binding for JAX: collectives inside and outside of jax.jit, and reduced gradients.

import farandole.jax as hvd
hvd.init()
params = hvd.broadcast_parameters(params, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer)  # an optimizer of Optax
"""

from farandole.core.operations.objects import allgather_object, broadcast_object
from farandole.core.operations.ops import barrier, join
from farandole.core.public import *
from farandole.errors import HorovodInternalError
from farandole.extras import importing as _importing

with _importing("farandole.jax"):
    from farandole.jax.ops import (
        Compression,
        allgather,
        allreduce,
        alltoall,
        broadcast,
        grouped_allgather,
        grouped_allreduce,
        grouped_reducescatter,
        reducescatter,
    )
    from farandole.jax.training import DistributedOptimizer, broadcast_parameters, grad, value_and_grad

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grad",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
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
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "sycl_built",
    "value_and_grad",
]
