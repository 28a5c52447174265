"""Optimizer classes with one class in front: the result is still an optimizer of the user's class."""

from collections.abc import Mapping
from typing import ClassVar, TypeVar

import torch

F = TypeVar("F", bound="Front")


class Front(torch.optim.Optimizer):
    """The class in front; it overrides methods, and `super()` is the user's class."""

    # Attributes that the made class has, unless the user's optimizer has them itself.
    insides: ClassVar[Mapping[str, object]] = {}

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
    names |= {name: each for name, each in front.insides.items() if not hasattr(optimizer, name)}
    made: type[F] = type(base.__name__, (front, base), names)
    wrapped = made.__new__(made)
    # A learning-rate scheduler has put its own `step` on the instance, which would bypass ours.
    vars(wrapped).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return wrapped
