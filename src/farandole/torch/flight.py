"""Gradients in flight: reading or changing one waits for its reduction."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Origin(NamedTuple):
    """The parameter of a gradient in flight, and a function that waits until the gradient is reduced."""

    # Weak, because the garbage collector does not see what a parameter's gradient refers to.
    parameter: "weakref.ref[torch.Tensor]"
    look: Callable[[], None]


class InFlight(torch.Tensor):
    """Gradient of a parameter during its reduction.

    Every use (clipping, a norm, a gradient scaler) waits for the reduction and then gets the reduced gradient. Only
    Python waits: autograd itself adds to the memory directly."""

    __slots__ = ("origin", "plain")
    plain: torch.Tensor
    origin: Origin

    @classmethod
    def cover(cls, parameter: torch.Tensor, origin: Origin) -> None:
        """Cover the gradient of `parameter`, which `origin` refers to."""
        plain = parameter.grad
        if plain is None or type(plain) is cls:
            return
        # A sparse tensor cannot be of another class: a dense one without memory stands for it.
        body = torch.zeros((), dtype=plain.dtype, device=plain.device).expand(plain.shape) if plain.is_sparse else plain
        cover = body.as_subclass(cls)
        cover.plain, cover.origin = plain, origin
        parameter.grad = cover

    @classmethod
    def replace(cls, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Give `parameter` another gradient, which code that holds the cover of the old one reads from now on."""
        cover = parameter.grad
        if isinstance(cover, cls):
            cover.plain = gradient  # first: another thread that sees the new gradient no longer waits
        parameter.grad = gradient

    @classmethod
    def uncover(cls, parameter: torch.Tensor) -> None:
        """Restore the plain gradient of `parameter`, if it is covered."""
        cover = parameter.grad
        if type(cover) is cls:
            parameter.grad = cover.plain

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

    def reduced(self) -> torch.Tensor:
        """Wait for the reduction and return the reduced gradient."""
        parameter = self.origin.parameter()
        if parameter is not None and parameter.grad is self:
            self.origin.look()
        return self.plain


def plain(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return `gradient`, or what it covers, reduced or not."""
    return gradient.plain if type(gradient) is InFlight else gradient


def _reduced(value: object) -> object:
    if isinstance(value, InFlight):
        return value.reduced()
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
