"""Binding for Keras 3 on its TensorFlow, torch and JAX backends, with Horovod's names.

import farandole.keras as hvd
hvd.init()
model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss="mse")
model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])
"""

from farandole.core import public as _public
from farandole.core.operations.objects import allgather_object, broadcast_object
from farandole.core.operations.ops import barrier
from farandole.core.public import *
from farandole.errors import HorovodInternalError
from farandole.extras import importing as _importing

with _importing("farandole.keras"):
    from farandole.keras import callbacks, elastic
    from farandole.keras import ops as _ops
    from farandole.keras.compression import Compression
    from farandole.keras.ops import *
    from farandole.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
    from farandole.keras.saving import load_model
    from farandole.keras.state import broadcast_global_variables, broadcast_variables

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedOptimizer",
    "allgather_object",
    "barrier",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
]
__all__ += _public.__all__
__all__ += _ops.__all__
