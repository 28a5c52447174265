"""PyTorch binding, with the names of Horovod's API.

import farandole.torch as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)"""

from farandole.core import public as _public
from farandole.core.operations.handle import Handle, poll, synchronize
from farandole.core.operations.objects import allgather_object, broadcast_object
from farandole.core.operations.ops import barrier, join
from farandole.core.public import *
from farandole.errors import HorovodInternalError
from farandole.extras import importing as _importing

with _importing("farandole.torch"):
    from farandole.torch import elastic
    from farandole.torch import ops as _ops
    from farandole.torch.local import DiLoCo, LocalSGD
    from farandole.torch.low_rank import PowerSGD
    from farandole.torch.ops import *
    from farandole.torch.optimizer import DistributedOptimizer
    from farandole.torch.own_gpu import prefer_own_gpu as _prefer_own_gpu
    from farandole.torch.shared import empty_shared
    from farandole.torch.sparse import sparse_allreduce_async
    from farandole.torch.state import broadcast_optimizer_state, broadcast_parameters
    from farandole.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

_prefer_own_gpu()

__all__ = [
    "DiLoCo",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "LocalSGD",
    "PowerSGD",
    "SyncBatchNorm",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "convert_sync_batchnorm",
    "elastic",
    "empty_shared",
    "join",
    "poll",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += _public.__all__
__all__ += _ops.__all__
