"""Binding for MXNet, with the names of Horovod's API.

import farandole.mxnet as hvd
hvd.init()
hvd.broadcast_parameters(net.collect_params(), root_rank=0)
trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
"""

from farandole.core import public as _public
from farandole.core.operations.handle import Handle, poll, synchronize
from farandole.core.operations.objects import allgather_object, broadcast_object
from farandole.core.operations.ops import barrier, join
from farandole.core.public import *
from farandole.extras import importing as _importing
from farandole.extras import prepare_mxnet as _prepare_mxnet

_prepare_mxnet()
with _importing("farandole.mxnet"):
    from farandole.mxnet import ops as _ops
    from farandole.mxnet.ops import *
    from farandole.mxnet.training import DistributedOptimizer, DistributedTrainer, broadcast_parameters

__all__ = [
    "DistributedOptimizer",
    "DistributedTrainer",
    "Handle",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "broadcast_parameters",
    "join",
    "poll",
    "synchronize",
]
__all__ += _public.__all__
__all__ += _ops.__all__
