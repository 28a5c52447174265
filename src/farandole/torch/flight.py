"""Gradients in flight: reading or changing one waits for its reduction."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

# A context in which gradients in flight are read and changed as they are, reduced or not.
as_they_are = torch._C.DisableTorchFunctionSubclass

S = TypeVar("S", bound=torch.Tensor)


class Origin(NamedTuple):
    """The parameter of a gradient in flight, and a function that waits until the gradient is reduced."""

    # Weak, because the garbage collector does not see what a parameter's gradient refers to.
    parameter: "weakref.ref[torch.Tensor]"
    look: Callable[[], None]


class InFlight(torch.Tensor):
    """Class of a gradient during its reduction; before and after it is a tensor like others.

    Every use (clipping, a norm, a gradient scaler) waits for the reduction and then gets the reduced gradient. Only
    Python waits: autograd itself adds to the memory directly. `torch.tensor`, functions of `torch.jit` and the function
    `torch.utils.dlpack.to_dlpack` do not wait either, because they never ask a tensor's class."""

    # Attributes of the tensor while it is in flight.
    origin: Origin
    kind: type[torch.Tensor]  # the class it had, unless that was torch.Tensor
    successor: torch.Tensor  # the gradient that its parameter has, or gets, in its place

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
        try:
            gradient.__class__ = cls
        except TypeError:  # a class with __slots__: a view of the gradient is in flight in its place
            parameter.grad = view = gradient.as_subclass(cls)
            view.origin, view.successor = gradient.__dict__.pop("origin"), gradient
            del gradient.__dict__["kind"]

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
        if type(gradient) is not cls:
            return
        fields = gradient.__dict__  # not its attributes: another thread may have uncovered it by now
        if "successor" in fields:
            parameter.grad = fields["successor"]
            return
        gradient.__class__ = fields.get("kind", torch.Tensor)
        fields.pop("kind", None)
        fields.pop("origin", None)

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

    # torch does not call __torch_function__ for these two.

    def as_subclass(self, cls: type[S]) -> S:
        """Return the reduced gradient as a tensor of another class."""
        return reduced(self).as_subclass(cls)

    def set_(self, *args: Any) -> torch.Tensor:
        """Give the gradient other memory once nothing is written to its own."""
        plain = reduced(self)
        plain.set_(*args)
        return plain


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
    fields = gradient.__dict__  # not its attributes: another thread may have uncovered it by now
    successor: torch.Tensor | None = fields.get("successor")
    if successor is not None:
        return successor
    with as_they_are():
        if gradient.layout is not torch.strided:
            return gradient.detach()  # a sparse tensor has no view of another class
        kind: type[torch.Tensor] = fields.get("kind", torch.Tensor)
        return torch.Tensor.as_subclass(gradient, kind)


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
