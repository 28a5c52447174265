"""Binding for JAX: collectives inside and outside of jax.jit, and reduced gradients.

import farandole.jax as hvd
hvd.init()
params = hvd.broadcast_parameters(params, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer)  # an optimizer of Optax
"""

from farandole.core import public as _public
from farandole.core.operations.objects import allgather_object, broadcast_object
from farandole.core.public import *
from farandole.errors import HorovodInternalError
from farandole.extras import importing as _importing

with _importing("farandole.jax"):
    from farandole.jax import cluster as _cluster  # noqa: F401  # registers jobs with jax.distributed
    from farandole.jax import elastic
    from farandole.jax import ops as _ops
    from farandole.jax.ops import *
    from farandole.jax.training import DistributedOptimizer, broadcast_parameters, grad, value_and_grad

__all__ = [
    "DistributedOptimizer",
    "HorovodInternalError",
    "allgather_object",
    "broadcast_object",
    "broadcast_parameters",
    "elastic",
    "grad",
    "value_and_grad",
]
__all__ += _public.__all__
__all__ += _ops.__all__
