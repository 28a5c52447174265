"""Handlers: how one kind of value in a `TorchState` is saved, restored and taken over from rank 0."""

import copy
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch

from farandole.core.operations.objects import broadcast_object
from farandole.torch.elastic.sampler import ElasticSampler
from farandole.torch.state import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "find_handler",
    "get_handler_registry",
    "set_handler_registry",
]

V = TypeVar("V")


class StateHandler(Generic[V]):
    """Handler of one value; subclasses in the registry handle values of their types."""

    def __init__(self, value: V) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy of the value's state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give the value the state that `save` has kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give the value rank 0's state; `TorchState` saves it when all values have theirs."""
        raise NotImplementedError

    def set_value(self, value: V) -> None:
        """Handle `value` from now on, and save it."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler[torch.nn.Module]):
    """Handler of a module: its parameters and buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._saved: dict[str, Any] = {}
        self.save()

    def save(self) -> None:
        self._saved = _copied(self.value.state_dict(), self._saved)

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        state = self.value.state_dict()
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        broadcast_parameters(tensors, root_rank=0)
        if len(tensors) < len(state):
            others = {name: value for name, value in state.items() if name not in tensors}
            self.value.load_state_dict({**tensors, **broadcast_object(others, 0, "elastic.model")})


class OptimizerStateHandler(StateHandler[torch.optim.Optimizer]):
    """Handler of an optimizer: its options and its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._saved: dict[str, Any] = {}
        self.save()

    def save(self) -> None:
        self._saved = _copied(self.value.state_dict(), self._saved)

    def restore(self) -> None:
        # The optimizer keeps the tensors that it is given and changes them in place.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler[ElasticSampler]):
    """Handler of an `ElasticSampler`: its epoch and the samples that were processed."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        self._saved: dict[str, int] = {}
        self.save()

    def save(self) -> None:
        self._saved = self.value.state_dict()

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0, "elastic.sampler"))


Registry = list[tuple[type, type[StateHandler[Any]]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return the pairs of a type and the handler of its values, in order of precedence."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the pairs of a type and the handler of its values."""
    global _registry
    _registry = registry


def find_handler(value: object) -> StateHandler[Any] | None:
    """Return a new handler for `value`; None if its type has none, so that it is kept as an object."""
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)


def _copied(value: Any, before: Any) -> Any:
    """Return a deep copy of `value`. It reuses the tensors of `before`, a former copy, where they have its form."""
    if isinstance(value, torch.Tensor):
        fits = isinstance(before, torch.Tensor) and _form(before) == _form(value) and value.layout == torch.strided
        return before.copy_(value.detach()) if fits else value.detach().clone()
    if isinstance(value, Mapping):
        old: Mapping[object, object] = before if isinstance(before, Mapping) else {}
        return {key: _copied(item, old.get(key)) for key, item in value.items()}
    return copy.deepcopy(value)


def _form(tensor: torch.Tensor) -> object:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout
