"""Binding for TensorFlow, with Horovod's names.

import farandole.tensorflow as hvd
hvd.init()
tape = hvd.DistributedGradientTape(tape)
hvd.broadcast_variables(model.variables, root_rank=0)
"""

from farandole.core import public as _public
from farandole.core.public import *
from farandole.errors import HorovodInternalError
from farandole.extras import importing as _importing

with _importing("farandole.tensorflow"):
    from farandole.tensorflow import elastic
    from farandole.tensorflow import ops as _ops
    from farandole.tensorflow.broadcasting import (
        BroadcastGlobalVariablesHook,
        broadcast_,
        broadcast_global_variables,
        broadcast_variables,
    )
    from farandole.tensorflow.compression import Compression
    from farandole.tensorflow.objects import allgather_object, broadcast_object, broadcast_object_fn
    from farandole.tensorflow.ops import *
    from farandole.tensorflow.optimizer import DistributedOptimizer
    from farandole.tensorflow.place import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
    from farandole.tensorflow.sync_batch_norm import SyncBatchNormalization
    from farandole.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather_object",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
]
__all__ += _public.__all__
__all__ += _ops.__all__
