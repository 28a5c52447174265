"""Attributes inside Horovod's optimizer that programs read or set, and the class in front that answers for them."""

from collections.abc import Mapping
from typing import ClassVar, NoReturn, Self

from farandole.torch.front import Front

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

    def __get__(self, optimizer: "HorovodFront | None", kind: type) -> Self:
        if optimizer is None:
            return self
        self._refuse(optimizer)

    def _refuse(self, optimizer: "HorovodFront") -> NoReturn:
        raise AttributeError(
            f"a distributed {type(optimizer).__name__} of farandole has no attribute {self._name!r}, an inside of "
            f"Horovod's: {self._remedy}",
            name=self._name,
            obj=optimizer,
        )


class _Fixed(_Absent):
    """One that cannot be set either, because its new value would have no effect."""

    def __set__(self, optimizer: "HorovodFront", value: object) -> None:
        self._refuse(optimizer)


class HorovodFront(Front):
    """A class in front whose optimizer programs take for Horovod's."""

    insides: ClassVar[Mapping[str, object]] = {
        **{name: _Absent(remedy) for name, remedy in _KEEPING.items()},
        **{name: _Fixed(remedy) for name, remedy in _ACTING.items()},
    }

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
