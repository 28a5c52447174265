"""State of elastic training with PyTorch."""

import torch

from farandole.core import default
from farandole.core.operations.objects import broadcast_object
from farandole.elastic.state import ObjectState
from farandole.torch.elastic.handlers import StateHandler, find_handler

__all__ = ["TorchState"]


class TorchState(ObjectState):
    """State of a model, an optimizer, and any other objects by name, which are attributes: `state.epoch`.

    Modules, optimizers and `ElasticSampler`s are saved by their handlers, see `get_handler_registry`; other objects by
    deep copies. Assigning another module, optimizer or sampler to an attribute saves it."""

    _handlers: dict[str, StateHandler[object]]

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: object,
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        found = {name: find_handler(value) for name, value in given.items()}
        self._handlers = {name: handler for name, handler in found.items() if handler is not None}
        for name in self._handlers:
            object.__setattr__(self, name, given[name])
        objects = {name: kwargs[name] for name in kwargs if found[name] is None}
        super().__init__(broadcast_object, default.rank, **objects)

    def save(self) -> None:
        """Keep a copy of everything in memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to the copy that `save` has kept."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's state, then save it. A rank that is lost meanwhile leaves the saved one as it was."""
        for name in sorted(self._handlers):
            self._handlers[name].sync()
        super().sync()
        for handler in self._handlers.values():
            handler.save()

    def reset(self) -> None:
        """Share out the samplers' samples over the ranks that there are now."""
        for handler in self._handlers.values():
            reset = getattr(handler.value, "reset", None)
            if callable(reset) and isinstance(handler.value, torch.utils.data.Sampler):
                reset()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_handlers", {}):
            self._handlers[name].set_value(value)
