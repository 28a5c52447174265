"""Handlers: how one kind of value in a `TorchState` is saved, restored and taken over from rank 0."""

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from farandole.core.operations.objects import broadcast_object
from farandole.elastic import StateHandler
from farandole.elastic.handlers import StatefulHandler, StateLost
from farandole.torch.elastic.sampler import ElasticSampler
from farandole.torch.front import Front
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


log = logging.getLogger(__name__)


class ModelStateHandler(StateHandler[torch.nn.Module]):
    """Handler of a module: its parameters and buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._saved: dict[str, Any] = {}
        self._stepped: set[torch.Tensor] = set()
        self.save()

    def leave_out(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keep no copies of `parameters`, which change in steps of an optimizer only."""
        self._stepped, self._saved = set(parameters), {}
        self.save()

    def save(self) -> None:
        pairs = self.value.named_parameters(remove_duplicate=False) if self._stepped else ()
        stepped = {name for name, parameter in pairs if parameter in self._stepped}
        self._saved = _copied({name: each for name, each in self._state().items() if name not in stepped}, self._saved)

    def restore(self) -> None:
        self.value.load_state_dict(self._saved, strict=False)

    def sync(self) -> None:
        held = self._state()
        mine = {name: _form(value) if isinstance(value, torch.Tensor) else value for name, value in held.items()}
        forms = broadcast_object(mine, 0, "elastic.model")
        # A new rank may lack what the others have made in training, such as the parameters of lazy modules.
        state = {name: _like(form, held.get(name)) for name, form in forms.items()}
        broadcast_parameters([(name, each) for name, each in state.items() if isinstance(each, torch.Tensor)], 0)
        if others := {name: value for name, value in state.items() if value is not held.get(name)}:
            self.value.load_state_dict(others, strict=False)

    def _state(self) -> dict[str, Any]:
        """Return what the module has made; lazy modules make parameters in their first step."""
        return {name: value for name, value in self.value.state_dict().items() if not is_lazy(value)}


class OptimizerStateHandler(StateHandler[torch.optim.Optimizer]):
    """Handler of an optimizer: its options and its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._saved: dict[str, Any] = {}
        self._copies, self._has_stepped = True, False
        self.save()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that the optimizer changes."""
        return [parameter for group in self.value.param_groups for parameter in group["params"]]

    def leave_out(self) -> None:
        """Keep no copies of the optimizer's state, which changes in its steps only: copy its options."""
        self._copies, self._saved = False, {}
        # Not a hook before the step: after `load_state_dict` torch calls those before the gradients are reduced.
        self.value.register_step_post_hook(self._note_step)
        self.save()

    def _note_step(self, optimizer: object, args: object, kwargs: object) -> None:
        self._has_stepped = True

    def save(self) -> None:
        state = self.value.state_dict()
        self._saved = _copied(state if self._copies else {"param_groups": state["param_groups"]}, self._saved)
        self._has_stepped, self._versions = False, self._count_changes()

    def _count_changes(self) -> list[int]:
        """Return how often each parameter was changed in place: a step may be broken off in the middle."""
        return [parameter._version for parameter in self.parameters]

    def restore(self) -> None:
        self._drop_gradients()
        if not self._copies:
            if self.is_changed:
                raise StateLost
            for group, saved in zip(self.value.param_groups, copy.deepcopy(self._saved["param_groups"]), strict=True):
                group.update({**saved, "params": group["params"]})
            return
        # The optimizer keeps the tensors that it is given and changes them in place.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def prepare(self) -> None:
        classes = (each for each in type(self.value).__mro__ if not issubclass(each, Front))
        kind = next(each for each in classes if issubclass(each, torch.optim.Optimizer))
        # A step of a user's class may do anything, such as reduce gradients.
        if not self.value.state and kind.__module__.startswith("torch.optim."):
            try:
                self.value.state.update(_first_state(self.value, kind))
            except Exception as error:  # LBFGS needs a closure, SparseAdam needs sparse gradients
                log.info(
                    "memory for the state of %s is allocated when it arrives: %r", type(self.value).__name__, error
                )
            if self._copies:
                self.save()

    def sync(self) -> None:
        self._has_stepped = True  # until it is saved: the state is filled in place
        broadcast_optimizer_state(self.value, root_rank=0)

    @property
    def is_changed(self) -> bool:
        return not self._copies and (self._has_stepped or self._versions != self._count_changes())

    def keep(self) -> None:
        self._has_stepped, self._versions = False, self._count_changes()

    def reset(self) -> None:
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        # Some were reduced when a rank was lost, others not, and new ranks have none.
        if isinstance(self.value, Front):
            self.value.rejoin()
        for parameter in self.parameters:
            parameter.grad = None


class SamplerStateHandler(StatefulHandler[ElasticSampler]):
    """Handler of an `ElasticSampler`: its epoch and the samples that were processed."""

    def __init__(self, sampler: ElasticSampler) -> None:  # the argument has Horovod's name
        super().__init__(sampler)

    def reset(self) -> None:
        self.value.reset()


class _ScalerStateHandler(StatefulHandler[torch.amp.GradScaler]):
    """Handler of a gradient scaler: its scale, without the optimizers of an unfinished step."""

    def restore(self) -> None:
        super().restore()
        self.reset()

    def reset(self) -> None:
        # Else the next step would take its gradients for unscaled already: `load_state_dict` keeps these notes.
        self.value._per_optimizer_states.clear()


Registry = list[tuple[type, type[StateHandler[Any]]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.amp.GradScaler, _ScalerStateHandler),
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


def _first_state(
    optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]
) -> dict[torch.Tensor, dict[str, Any]]:
    """Return zeros in the form of the state that the optimizer's first step makes.

    A copy of the optimizer, of class `kind`, takes that step with parameters that have no memory, and without hooks."""
    dry = kind.__new__(kind)
    taken = {name: OrderedDict() if name.endswith("_hooks") else value for name, value in vars(optimizer).items()}
    taken.pop("step", None)  # that of a learning-rate scheduler
    groups = [
        {**group, "params": [_without_memory(each) for each in group["params"]]} for group in optimizer.param_groups
    ]
    vars(dry).update({**taken, "state": defaultdict(dict), "param_groups": groups})
    dry.step()
    pairs = [
        (parameter, stand_in)
        for group, dry_group in zip(optimizer.param_groups, groups, strict=True)
        for parameter, stand_in in zip(group["params"], dry_group["params"], strict=True)
    ]
    return {
        parameter: {name: _written(value, parameter.device) for name, value in dry.state[stand_in].items()}
        for parameter, stand_in in pairs
        if dry.state[stand_in]
    }


def _without_memory(parameter: torch.Tensor) -> torch.Tensor:
    stand_in = torch.empty_like(parameter, device="meta", requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        stand_in.grad = torch.empty_like(stand_in, requires_grad=False)
    return stand_in


def _written(value: object, device: torch.device) -> object:
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        return torch.empty_like(value, device=device).zero_()
    return value


def _copied(value: Any, before: Any) -> Any:
    """Return a deep copy of `value`. It reuses the tensors of `before`, a former copy, where they have its form."""
    if isinstance(value, torch.Tensor):
        fits = isinstance(before, torch.Tensor) and _form(before) == _form(value) and value.layout == torch.strided
        return before.copy_(value.detach()) if fits else value.detach().clone()
    if isinstance(value, Mapping):
        old: Mapping[object, object] = before if isinstance(before, Mapping) else {}
        return {key: _copied(item, old.get(key)) for key, item in value.items()}
    return copy.deepcopy(value)


@dataclass(frozen=True)
class _Form:
    """Shape, dtype, device and layout of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout


def _form(tensor: torch.Tensor) -> _Form:
    return _Form(tensor.shape, tensor.dtype, tensor.device, tensor.layout)


def _like(form: object, held: object) -> object:
    """Return `held` if it is a tensor of this shape and dtype, else a new one; other values as they are."""
    if not isinstance(form, _Form):
        return form
    fits = isinstance(held, torch.Tensor) and (held.shape, held.dtype) == (form.shape, form.dtype)
    return held if fits else torch.empty(form.shape, dtype=form.dtype)
