"""Elastic training with PyTorch, with the names of Horovod's API.

state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 90):
        ...
        state.commit()"""

from farandole.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, run
from farandole.torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from farandole.torch.elastic.sampler import ElasticSampler
from farandole.torch.elastic.state import TorchState

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]
