"""Interface to a framework's tensors; all other code is written once, in `core`."""

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class DeviceResult(Protocol):
    """Result of an operation on a GPU whose size only the plan shows; it is in host memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor for `copy_to`."""

    def copy_to(self, tensor: object) -> None:
        """Copy the result to `tensor`, of the input's dtype and device, in the current stream. May be called once."""


class Adapter(Protocol[T]):
    """Access to one framework's tensors. Stateless: all ranks and threads of a process share one instance."""

    @property
    def name(self) -> str:
        """The framework's name, as users write it."""

    @property
    def own_type(self) -> type | None:
        """A type whose objects `check` and `overwrite` accept without any work; None if there is none.

        Comparing types takes less time than these calls."""

    def check(self, tensor: T, name: str) -> None:
        """Refuse, quickly, objects that the engine would accept but must not.

        Raises `TypeError` for objects other than the framework's tensors, and `InvalidRequest` for tensors whose memory
        does not hold their values.
        """

    def overwrite(self, tensor: T, name: str) -> None:
        """Check a tensor that the engine is about to overwrite, and tell the framework that its values change."""

    def check_each(self, tensors: Sequence[T], name: str) -> None:
        """Check all tensors of a group, faster than `check` for each."""

    def overwrite_each(self, tensors: Sequence[T], name: str) -> None:
        """Do as `overwrite` for all tensors of a group, but faster."""

    def refusal(self, tensor: T) -> str | None:
        """Return the reason, in the framework's terms, why the engine cannot use a tensor; None if it can."""

    def dense(self, tensor: T, name: str, write: bool) -> T:
        """Return `tensor` if it is contiguous, else a contiguous copy.

        Raises `InvalidRequest` if it is to be written, and `restore` cannot."""

    def restore(self, values: T, tensor: T, write: bool) -> T:
        """Return `values`, which are contiguous, in `tensor` itself with `write`, else in its memory format."""

    def empty_like(self, tensor: T) -> T:
        """Return an uninitialized tensor of the same shape and dtype; contiguous if `tensor` is."""

    def adopt(self, result: object, like: T) -> T:
        """Return a tensor over memory of the engine, without a copy; `like` has its dtype and device.

        If `like` is on a GPU, `result` is a `DeviceResult`, which is copied."""

    def read_splits(self, splits: object, name: str) -> list[int]:
        """Return the user's `splits`, a list or an integer tensor, as rows per rank; raises `InvalidRequest`."""

    def make_splits(self, splits: Sequence[int], given: object) -> T:
        """Return the received rows per rank as an int32 tensor; `given` are the user's splits."""

    def is_floating(self, tensor: T) -> bool:
        """Return whether the dtype is a floating-point one."""

    def cast(self, tensor: T, dtype: object) -> T:
        """Return the tensor in `dtype`, a dtype of this framework."""

    def dtype(self, tensor: T) -> object:
        """Return the framework's dtype object."""
