"""Binding for Keras 3 on its TensorFlow, torch and JAX backends, with Horovod's names.

import farandole.keras as hvd
hvd.init()
model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])
"""

from farandole.core.operations.objects import allgather_object, broadcast_object
from farandole.core.operations.ops import barrier
from farandole.core.public import *
from farandole.errors import HorovodInternalError
from farandole.extras import importing as _importing

with _importing("farandole.keras"):
    from farandole.keras import callbacks
    from farandole.keras.compression import Compression
    from farandole.keras.ops import allgather, allreduce, broadcast, reducescatter
    from farandole.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
    from farandole.keras.saving import load_model
    from farandole.keras.state import broadcast_global_variables, broadcast_variables

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
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
]
