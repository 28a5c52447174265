"""A class put in front of an optimizer's class: the result is an optimizer of the user's class all the same."""

from typing import TypeVar

import torch

__all__ = ["Front", "put_in_front"]

F = TypeVar("F", bound="Front")


class Front(torch.optim.Optimizer):
    """What is put in front; it overrides what it changes, and `super()` is the user's class."""

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Refuse to be copied or pickled: the copy would train on its own, without anybody noticing."""
        raise TypeError(
            f"a distributed {type(self).__name__} belongs to this rank and its job, and cannot be copied or pickled; "
            "save or copy its state_dict(), and load that into another DistributedOptimizer"
        )


def put_in_front(front: type[F], optimizer: torch.optim.Optimizer) -> F:
    """Return an optimizer of a subclass of `optimizer`'s class with `front` before it; it shares all that it has."""
    base = type(optimizer)
    made: type[F] = type(base.__name__, (front, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    wrapped = made.__new__(made)
    # A learning-rate scheduler has put a `step` of its own on the instance, which would go round ours.
    vars(wrapped).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return wrapped
