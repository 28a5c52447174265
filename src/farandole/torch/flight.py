"""Gradients in flight: reading or changing one waits for its reduction."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

# A context in which gradients in flight are read and changed as they are, reduced or not.
as_they_are = torch._C.DisableTorchFunctionSubclass


class Origin(NamedTuple):
    """The parameter of a gradient in flight, and a function that waits until the gradient is reduced."""

    # Weak, because the garbage collector does not see what a parameter's gradient refers to.
    parameter: "weakref.ref[torch.Tensor]"
    look: Callable[[], None]


class InFlight(torch.Tensor):
    """Class of a gradient during its reduction; before and after it is a tensor like others.

    Every use (clipping, a norm, a gradient scaler) waits for the reduction and then gets the reduced gradient. Only
    Python waits: autograd itself adds to the memory directly."""

    # Attributes of the tensor while it is in flight.
    origin: Origin
    kind: type[torch.Tensor] = torch.Tensor  # the class it had
    successor: torch.Tensor | None = None  # the gradient that its parameter has in its place

    @classmethod
    def cover(cls, parameter: torch.Tensor, origin: Origin) -> None:
        """Make the gradient of `parameter`, which `origin` refers to, one in flight."""
        gradient = parameter.grad
        kind = type(gradient)
        if gradient is None or kind is cls:
            return
        gradient.origin = origin  # type: ignore[attr-defined]  # before the class: another thread may read it at once
        if kind is not torch.Tensor:
            gradient.kind = kind  # type: ignore[attr-defined]
        gradient.__class__ = cls

    @classmethod
    def replace(cls, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Give `parameter` another gradient, which code that holds the old one in flight reads from now on."""
        old = parameter.grad
        if isinstance(old, cls):
            old.successor = gradient  # first: another thread that sees the new gradient no longer waits
        parameter.grad = gradient

    @classmethod
    def uncover(cls, parameter: torch.Tensor) -> None:
        """Make the gradient of `parameter` a tensor like others, if it is in flight."""
        gradient = parameter.grad
        if type(gradient) is cls:
            gradient.__class__ = gradient.kind  # type: ignore[assignment]  # a class of tensors
            gradient.__dict__.pop("kind", None)
            gradient.__dict__.pop("origin", None)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Call `func` with the reduced gradient."""
        return func(*map(_reduced, args), **{key: _reduced(value) for key, value in (kwargs or {}).items()})


def reduced(gradient: torch.Tensor) -> torch.Tensor:
    """Wait for the reduction of `gradient`, which is or was in flight, and return the reduced one."""
    origin: Origin | None = gradient.__dict__.get("origin")
    parameter = origin.parameter() if origin is not None else None
    if origin is not None and parameter is not None and parameter.grad is gradient:
        origin.look()
    return bare(gradient)


def bare(gradient: torch.Tensor) -> torch.Tensor:
    """Return `gradient`, or if it is in flight what stands in its place or shares its memory, reduced or not."""
    if type(gradient) is not InFlight:
        return gradient
    if gradient.successor is not None:
        return gradient.successor
    with as_they_are():
        return gradient.as_subclass(gradient.kind)


def _reduced(value: object) -> object:
    if isinstance(value, InFlight):
        return reduced(value)
    if type(value) is list:
        return [_reduced(each) for each in value]
    if type(value) is tuple:
        return tuple(_reduced(each) for each in value)
    return value


class Flight:
    """Gradients of some parameters that are reduced together."""

    def __init__(self, parameters: Sequence[torch.Tensor], complete: Callable[[], object]) -> None:
        self.parameters, self._complete = parameters, complete
        self._landed: list[torch.Tensor | None] | None = None
        # Without it, a second thread that reads gradients would copy the result over changes of the first one.
        # Reentrant, because a user's compressor may read a gradient, too.
        self._waiting = threading.RLock()

    def wait(self) -> None:
        """Wait for the reduction, the first time, and show its result; raises its error every time."""
        with self._waiting:
            if self._landed is None:
                self._land()

    def _land(self) -> None:
        try:
            self._complete()
        finally:
            for parameter in self.parameters:
                InFlight.uncover(parameter)
        self._landed = [parameter.grad for parameter in self.parameters]

    def was_replaced(self, parameter: torch.Tensor) -> bool:
        """Return whether the reduction has completed and `parameter` has another gradient since."""
        return self._landed is not None and all(parameter.grad is not each for each in self._landed)
