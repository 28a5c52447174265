"""State of elastic training with PyTorch."""

from typing import Any

import torch

from farandole.core import default
from farandole.core.operations.objects import broadcast_object
from farandole.elastic import ObjectState, StateHandler
from farandole.torch.elastic.handlers import find_handler

__all__ = ["TorchState"]


class TorchState(ObjectState):
    """State of a model, an optimizer, and any other objects by name, which are attributes: `state.epoch`.

    Modules, optimizers, `ElasticSampler`s and loaders are saved by their handlers, see `get_handler_registry`; other
    objects by deep copies. Assigning another one of them to its attribute saves it."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: object,
    ) -> None:
        given = {name: value for name, value in (("model", model), ("optimizer", optimizer)) if value is not None}
        super().__init__(broadcast_object, default.rank, **given, **kwargs)

    def _handler_of(self, value: object) -> StateHandler[Any] | None:
        return find_handler(value) or super()._handler_of(value)
