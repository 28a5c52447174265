"""Handlers: how one kind of value in a state is saved, restored and taken over from rank 0."""

import copy
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from farandole.core import default
from farandole.core.operations.objects import broadcast_object
from farandole.errors import FarandoleError

__all__ = ["LoaderStateHandler", "Resizable", "StateHandler", "StateLost", "Stateful", "StatefulHandler"]

V = TypeVar("V")


class StateLost(FarandoleError):
    """A handler has no copy of what was saved, and the value has changed since; another rank may have it."""


class StateHandler(Generic[V]):
    """Handler of one value of a state."""

    def __init__(self, value: V) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy of the value's state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give the value the state that `save` has kept; raises `StateLost` if there is no copy of it."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Allocate in a newcomer, while the others train, what `sync` will fill; does nothing by default."""

    def sync(self) -> None:
        """Give the value rank 0's state; the state saves it when all values have theirs."""
        raise NotImplementedError

    @property
    def is_changed(self) -> bool:
        """Return whether the value has changed since `save`, which has kept no copy."""
        return False

    def keep(self) -> None:
        """Note that the value is the saved one, after a `sync` that has failed: rank 0 was sending the same."""

    def reset(self) -> None:
        """Prepare the value for other ranks than before; does nothing by default."""

    def set_value(self, value: V) -> None:
        """Handle `value` from now on, and save it."""
        self.value = value
        self.save()


@runtime_checkable
class Resizable(Protocol):
    """A loader whose position in an epoch does not depend on the number of ranks, such as `farandole.data.Loader`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def resize(self, rank: int, size: int) -> None: ...


@runtime_checkable
class Stateful(Protocol):
    """An object that writes and reads its own state, such as a scheduler of the learning rate or a gradient scaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> object: ...


F = TypeVar("F", bound=Stateful)


class StatefulHandler(StateHandler[F]):
    """Handler of an object that stays the same: only its state is saved, and taken over from rank 0."""

    def __init__(self, value: F) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # The object may keep what it is given, and change that.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0, "elastic.state"))


class LoaderStateHandler(StatefulHandler[Resizable]):
    """Handler of a loader: the rows of the epoch that all ranks have visited; a reset shares out the others."""

    def reset(self) -> None:
        self.value.resize(default.rank(), default.size())
