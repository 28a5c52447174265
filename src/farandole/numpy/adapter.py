"""Adapter for NumPy arrays."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from farandole.errors import InvalidRequest

# Shape and dtype are not known to the type checker; they are checked when an operation is called.
Array: TypeAlias = npt.NDArray[Any]


class NumpyAdapter:
    """Adapter for arrays with the dtypes that the engine reduces; the reference for other adapters."""

    name = "numpy"
    own_type = np.ndarray

    def check(self, tensor: Array, name: str) -> None:
        """Refuse objects other than arrays, and arrays with a mask."""
        if not isinstance(tensor, np.ndarray):
            raise TypeError(f"'{name}': expected a numpy array, got {type(tensor).__name__}")
        if isinstance(tensor, np.ma.MaskedArray):
            raise InvalidRequest(name, "the mask of a masked array cannot be sent; pass tensor.filled(0), or the like")

    def overwrite(self, tensor: Array, name: str) -> None:
        """Refuse objects other than arrays; the engine refuses read-only arrays."""
        self.check(tensor, name)

    def check_each(self, tensors: Sequence[Array], name: str) -> None:
        """Check each tensor as `check` does."""
        for tensor in tensors:
            self.check(tensor, name)

    def overwrite_each(self, tensors: Sequence[Array], name: str) -> None:
        """Check each tensor as `overwrite` does."""
        self.check_each(tensors, name)

    def refusal(self, tensor: Array) -> str | None:
        """Return the reason if the engine does not support the dtype, else None."""
        if tensor.dtype.kind not in "biuf" or not tensor.dtype.isnative or tensor.dtype.itemsize > 8:
            return f"dtype {tensor.dtype} is not supported; use bool, an integer of 8 to 64 bits or a float of 16 to 64"
        return None

    def dense(self, tensor: Array, name: str, write: bool) -> Array:
        """Return the array if it is C-contiguous, else a copy. Refuses to write to a read-only one."""
        if tensor.flags.c_contiguous:
            return tensor
        if write and not tensor.flags.writeable:
            raise InvalidRequest(name, "the array is read-only; pass a copy")
        return np.array(tensor, order="C", subok=False)

    def restore(self, values: Array, tensor: Array, write: bool) -> Array:
        """Copy the values to `tensor`, or return them, which are C-contiguous."""
        if not write or values is tensor:
            return values
        np.copyto(tensor, values)
        return tensor

    def empty_like(self, tensor: Array) -> Array:
        """Return an uninitialized C-contiguous array of the same shape and dtype."""
        return np.empty(tensor.shape, tensor.dtype)

    def adopt(self, result: object, like: Array) -> Array:
        """Return a writable array over the engine's memory."""
        # This uses the buffer protocol. NumPy's from_dlpack makes all arrays read-only before 2.1.
        return np.asarray(result)

    def read_splits(self, splits: object, name: str) -> list[int]:
        """Read a list or an integer array of one dimension."""
        array = np.asarray(splits)
        if array.ndim != 1 or not (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
            raise InvalidRequest(name, f"splits must be a list of integers, got {splits!r}")
        return [int(part) for part in array]

    def make_splits(self, splits: Sequence[int], given: object) -> Array:
        """Return an int32 array."""
        return np.array(splits, np.int32)

    def dtype(self, tensor: Array) -> object:
        """Return the array's dtype."""
        return tensor.dtype

    def is_floating(self, tensor: Array) -> bool:
        """Return whether the dtype is a floating-point one."""
        return bool(np.issubdtype(tensor.dtype, np.floating))

    def cast(self, tensor: Array, dtype: object) -> Array:
        """Return a copy in `dtype`."""
        return tensor.astype(dtype)  # type: ignore[call-overload,no-any-return]  # the dtype came from `dtype` above
