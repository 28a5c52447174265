"""Interface to a framework's tensors; everything else is written once, here in `core`."""

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

__all__ = ["Adapter", "DeviceResult"]

T = TypeVar("T")


@runtime_checkable
class DeviceResult(Protocol):
    """The result of an operation on a GPU whose size only the plan knows; it lies in host memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor to make."""

    def copy_to(self, tensor: object) -> None:
        """Copy the result to `tensor`, once: of the input's dtype and device. Later work in the stream sees it."""


class Adapter(Protocol[T]):
    """One framework's tensors. Holds no state: one instance serves all ranks and threads of a process."""

    @property
    def name(self) -> str:
        """The framework's name, as users write it."""

    @property
    def own_type(self) -> type | None:
        """The type whose objects `check` and `overwrite` always accept and do nothing with; None if there is none.

        A look at a type takes less time than a call."""

    def check(self, tensor: T, name: str) -> None:
        """Refuse, quickly, what the engine would take and must not: other frameworks' tensors, memory that lies.

        Raises `TypeError` for what is no tensor and `InvalidRequest` otherwise.
        """

    def overwrite(self, tensor: T, name: str) -> None:
        """Do what `check` does for a tensor that the engine is about to write to; let the framework know of it."""

    def check_each(self, tensors: Sequence[T], name: str) -> None:
        """Do what `check` does for each of a group, in less time."""

    def overwrite_each(self, tensors: Sequence[T], name: str) -> None:
        """Do what `overwrite` does for each of a group, in less time."""

    def refusal(self, tensor: T) -> str | None:
        """Say in the framework's words why the engine cannot take a tensor (dtype, device, layout); None if it can."""

    def empty_like(self, tensor: T) -> T:
        """Return an uninitialized contiguous tensor of the same shape and dtype."""

    def adopt(self, result: object, like: T) -> T:
        """Return a tensor over memory that the engine allocated, without a copy; `like` has its dtype and device.

        If `like` is on a GPU, `result` is a `DeviceResult`, and is copied."""

    def read_splits(self, splits: object, name: str) -> list[int]:
        """Return the rows per rank that a user gave as a list or as an integer tensor; raises `InvalidRequest`."""

    def make_splits(self, splits: Sequence[int], given: object) -> T:
        """Return the received rows per rank as an int32 tensor; `given` are the splits that the user gave."""

    def is_floating(self, tensor: T) -> bool:
        """Return whether the dtype is a floating one."""

    def cast(self, tensor: T, dtype: object) -> T:
        """Return the tensor in another dtype of this framework."""

    def dtype(self, tensor: T) -> object:
        """Return the framework's dtype object."""
