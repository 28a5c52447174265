"""Optimizer classes with one class in front: the result is still an optimizer of the user's class."""

from typing import NoReturn, Self, TypeVar

import torch

F = TypeVar("F", bound="Front")

_BY_CODEC = "to change what is sent, give DistributedOptimizer a class of compress and decompress as compression="
_BY_STEP = "to change gradients, call synchronize(), change them, and call step() inside skip_synchronize()"
# Attributes of Horovod's optimizer that programs read or replace, with what has their effect here.
_ACTING = {
    "_compression": _BY_CODEC,
    "_allreduce_grad_async": _BY_CODEC,
    "_grouped_allreduce_grad_async": _BY_CODEC,
    "_allreduce_delay": "call set_backward_passes_per_step",
    "_make_hook": _BY_STEP,
    "_register_hooks": _BY_STEP,
}
# Those that programs empty, so that Horovod forgets gradients: nothing is left here that would have to be forgotten.
_KEEPING = dict.fromkeys(("_handles", "_requires_update", "_grad_accs"), _BY_STEP)


class _Absent:
    """An attribute that only Horovod's optimizer has; reading it raises `AttributeError`, unless it was set."""

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: "Front | None", kind: type) -> Self:
        if optimizer is None:
            return self
        self._refuse(optimizer)

    def _refuse(self, optimizer: "Front") -> NoReturn:
        raise AttributeError(
            f"a distributed {type(optimizer).__name__} of farandole has no attribute {self._name!r}, an inside of "
            f"Horovod's: {self._remedy}",
            name=self._name,
            obj=optimizer,
        )


class _Fixed(_Absent):
    """One that cannot be set either, because its new value would have no effect."""

    def __set__(self, optimizer: "Front", value: object) -> None:
        self._refuse(optimizer)


class Front(torch.optim.Optimizer):
    """The class in front; it overrides methods, and `super()` is the user's class."""

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes whose gradients are added up; setting it is `set_backward_passes_per_step`."""
        return self._passes()

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes per step; raises `ValueError` unless positive."""
        raise NotImplementedError

    def _passes(self) -> int:
        raise NotImplementedError

    def rejoin(self) -> None:
        """Prepare for the other ranks that an elastic job has now."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load into the groups and the state that the optimizer behind this one shares.

        PyTorch makes new ones. A learning-rate scheduler of that optimizer would set the rate of the old groups."""
        groups, state = self.param_groups, self.state
        super().load_state_dict(state_dict)
        for group, new in zip(groups, self.param_groups, strict=True):
            if group is not new:
                group.clear()
                group.update(new)
        if state is not self.state:
            state.clear()
            state.update(self.state)
        self.param_groups, self.state = groups, state

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Refuse to be copied or pickled: the copy would silently train alone."""
        raise TypeError(
            f"a distributed {type(self).__name__} belongs to this rank and its job, and cannot be copied or pickled; "
            "save or copy its state_dict(), and load that into another DistributedOptimizer"
        )


def mix_in(front: type[F], optimizer: torch.optim.Optimizer) -> F:
    """Return an optimizer of a subclass of `optimizer`'s class with `front` before it; both share all attributes.

    Raises `ValueError` for an optimizer that has such a class already: its steps would reduce the gradients twice."""
    base = type(optimizer)
    if isinstance(optimizer, Front):
        raise ValueError(f"the {base.__name__} is distributed already")
    names: dict[str, object] = {"__module__": base.__module__, "__doc__": base.__doc__}
    # The user's class may have attributes of these names itself.
    absent = {name: _Absent(remedy) for name, remedy in _KEEPING.items()}
    absent |= {name: _Fixed(remedy) for name, remedy in _ACTING.items()}
    names |= {name: each for name, each in absent.items() if not hasattr(optimizer, name)}
    made: type[F] = type(base.__name__, (front, base), names)
    wrapped = made.__new__(made)
    # A learning-rate scheduler has put its own `step` on the instance, which would bypass ours.
    vars(wrapped).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return wrapped
