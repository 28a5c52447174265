"""Binding for NumPy: the reference binding, which has only the operations.

import farandole.numpy as hvd
hvd.init()
mean = hvd.allreduce(array, name="loss")
"""

from farandole.core import public as _public
from farandole.core.operations.handle import Handle, poll, synchronize
from farandole.core.operations.objects import allgather_object, broadcast_object
from farandole.core.operations.ops import barrier, join
from farandole.core.public import *
from farandole.numpy import ops as _ops
from farandole.numpy.ops import *
from farandole.numpy.shared import empty_shared

__all__ = ["Handle", "allgather_object", "barrier", "broadcast_object", "empty_shared", "join", "poll", "synchronize"]
__all__ += _public.__all__
__all__ += _ops.__all__
