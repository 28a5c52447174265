"""NumPy arrays as the engine's tensors."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from farandole.errors import InvalidRequest

__all__ = ["Array", "NumpyAdapter"]

# Shape and dtype are not known to the type checker; they are checked when an operation is called.
Array: TypeAlias = npt.NDArray[Any]

_DTYPES = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
)


class NumpyAdapter:
    """The reference adapter; the others do the same for their frameworks."""

    name = "numpy"

    def check(self, tensor: Array, name: str) -> None:
        """Refuse what is no array (`TypeError`), and dtypes and layouts the engine cannot read."""
        if not isinstance(tensor, np.ndarray):
            raise TypeError(f"'{name}': expected a numpy array, got {type(tensor).__name__}")
        if tensor.dtype not in _DTYPES:
            known = ", ".join(sorted(dtype.name for dtype in _DTYPES))
            raise InvalidRequest(name, f"dtype {tensor.dtype} is not supported; use one of {known}")
        if not tensor.flags.c_contiguous:
            raise InvalidRequest(name, "the array is required to be contiguous; use numpy.ascontiguousarray")

    def check_writable(self, tensor: Array, name: str) -> None:
        """As `check`, and refuse read-only arrays."""
        self.check(tensor, name)
        if not tensor.flags.writeable:
            raise InvalidRequest(name, "the array is read-only; use the form that returns a new array")

    def empty_like(self, tensor: Array) -> Array:
        """Return an uninitialized array."""
        return np.empty(tensor.shape, tensor.dtype)

    def adopt(self, result: object, like: Array) -> Array:
        """Return an array over the engine's memory."""
        return np.from_dlpack(result)  # type: ignore[arg-type]  # any object with __dlpack__ will do

    def read_splits(self, splits: object, name: str) -> list[int]:
        """Read a list or an integer array of one dimension."""
        array = np.asarray(splits)
        if array.ndim != 1 or not (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
            raise InvalidRequest(name, f"splits must be a list of integers, got {splits!r}")
        return [int(part) for part in array]

    def make_splits(self, splits: Sequence[int]) -> Array:
        """Return an int32 array."""
        return np.array(splits, np.int32)

    def dtype(self, tensor: Array) -> object:
        """Return the array's dtype."""
        return tensor.dtype

    def is_floating(self, tensor: Array) -> bool:
        """Return whether the dtype is a floating one."""
        return bool(np.issubdtype(tensor.dtype, np.floating))

    def cast(self, tensor: Array, dtype: object) -> Array:
        """Return a copy in `dtype`."""
        return tensor.astype(dtype)  # type: ignore[call-overload,no-any-return]  # the dtype came from `dtype` above
