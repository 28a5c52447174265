"""State of elastic training with PyTorch."""

import gc
from typing import Any

import torch
import torch.distributed as dist

from farandole.core import default
from farandole.core.operations.objects import broadcast_object
from farandole.elastic import ObjectState, StateHandler
from farandole.torch.elastic.handlers import ModelStateHandler, OptimizerStateHandler, find_handler


class TorchState(ObjectState):
    """State of a model, an optimizer, and any other objects by name, which are attributes: `state.epoch`.

    Modules, optimizers, `ElasticSampler`s and loaders are saved by their handlers, see `get_handler_registry`;
    schedulers of the learning rate, gradient scalers and what else has `state_dict` by that; other objects by copies.
    Assigning another one of them to its attribute saves it, except for the last kind.

    With `copies=False`, `commit` copies neither the optimizer's parameters nor its state, so that a program can call it
    after every step. When a rank is lost, ranks that have not begun the next update of the parameters hold the last
    commit as it is; those whose parameters have changed since take it over from them. So between `optimizer.step()` and
    `commit()` a program must not communicate: a loss at that moment on all ranks would end the job. Parameters and
    optimizer must belong to one another, change in `optimizer.step()` alone, and be reduced before, not by Adasum."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        copies: bool = True,
        **kwargs: object,
    ) -> None:
        given = {name: value for name, value in (("model", model), ("optimizer", optimizer)) if value is not None}
        super().__init__(broadcast_object, default.rank, **given, **kwargs)
        if not copies:
            self._leave_out_copies()

    def reset(self) -> None:
        """Prepare values for the ranks that there are now; leave farandole's process groups of torch.distributed."""
        if dist.is_available() and dist.is_initialized() and dist.get_backend() == "farandole":
            dist.destroy_process_group()
            gc.collect()  # a DistributedDataParallel of the last generation has hooks in its module's parameters
        super().reset()

    def _leave_out_copies(self) -> None:
        optimizers = [each for each in self._handlers.values() if isinstance(each, OptimizerStateHandler)]
        for each in optimizers:
            each.leave_out()
        stepped = [parameter for each in optimizers for parameter in each.parameters]
        for handler in self._handlers.values():
            if isinstance(handler, ModelStateHandler):
                handler.leave_out(stepped)

    def _handler_of(self, value: object) -> StateHandler[Any] | None:
        return find_handler(value) or super()._handler_of(value)
