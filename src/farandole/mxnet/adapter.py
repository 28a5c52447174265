"""Adapter for MXNet's arrays in host memory, of both kinds: `mxnet.nd.NDArray` and `mxnet.np.ndarray`."""

import ctypes
from collections.abc import Sequence
from operator import attrgetter
from typing import TypeAlias

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from farandole.errors import InvalidRequest

# Shape and dtype are not known to the type checker; they are checked when an operation is called.
Array: TypeAlias = mx.nd.NDArray

_device_of = attrgetter("device" if hasattr(mx.nd.NDArray, "device") else "ctx")  # MXNet 2 warns of `ctx`


class MxnetAdapter:
    """Adapter for dense arrays on the CPU.

    MXNet computes asynchronously. The engine borrows an array by `to_dlpack_for_read`, which waits until the array is
    computed, but not for computations that still read it."""

    name = "mxnet"
    own_type = None

    def check(self, tensor: Array, name: str) -> None:
        """Refuse objects other than dense arrays in host memory. Blocks until the values are computed."""
        if not isinstance(tensor, mx.nd.NDArray):
            raise TypeError(f"'{name}': expected an MXNet array, got {type(tensor).__name__}")
        if tensor.stype != "default":
            raise InvalidRequest(name, f"the array is sparse ({tensor.stype}); pass array.tostype('default')")
        if (device := _device_of(tensor)).device_type == "gpu":
            raise InvalidRequest(name, f"the array is on {device}; pass a copy on mxnet.cpu()")
        # oneDNN leaves results, such as a convolution's, in a layout of its own; MXNDArrayGetData makes it row-major.
        tensor.wait_to_read()
        _address(tensor)

    def overwrite(self, tensor: Array, name: str) -> None:
        """Check the array as `check` does. Blocks until no computation of MXNet's reads it."""
        self.check(tensor, name)
        check_call(_LIB.MXNDArrayWaitToWrite(tensor.handle))

    def check_each(self, tensors: Sequence[Array], name: str) -> None:
        """Check each array as `check` does."""
        for tensor in tensors:
            self.check(tensor, name)

    def overwrite_each(self, tensors: Sequence[Array], name: str) -> None:
        """Check each array as `check` does. Blocks until MXNet is idle: waiting for each array takes 80 us."""
        self.check_each(tensors, name)
        mx.nd.waitall()

    def refusal(self, tensor: Array) -> str | None:
        """Return the reason if the engine does not support the dtype, else None."""
        if np.dtype(tensor.dtype).kind in "biuf":
            return None
        return f"dtype {np.dtype(tensor.dtype)} is not supported; use bool, an integer or a float of 16 to 64 bits"

    def dense(self, tensor: Array, name: str, write: bool) -> Array:
        """Return the array: all are contiguous."""
        return tensor

    def restore(self, values: Array, tensor: Array, write: bool) -> Array:
        """Return the values, copied to `tensor` if it is to be written."""
        if not write or values is tensor:
            return values
        values.copyto(tensor)
        tensor.wait_to_read()
        return tensor

    def empty_like(self, tensor: Array) -> Array:
        """Return an uninitialized array of the same kind, shape and dtype."""
        with mx.util.np_shape(True):  # otherwise MXNet takes () and sizes of 0 for unknown
            return _kind(mx.nd.empty(tensor.shape, _device_of(tensor), tensor.dtype), tensor)

    def adopt(self, result: object, like: Array) -> Array:
        """Return a copy of the engine's memory: MXNet lends memory only for a few dtypes."""
        with mx.util.np_shape(True):
            return _kind(mx.nd.array(np.asarray(result), _device_of(like), like.dtype), like)

    def read_splits(self, splits: object, name: str) -> list[int]:
        """Read a list or an integer array of one dimension."""
        array = np.asarray(splits.asnumpy() if isinstance(splits, mx.nd.NDArray) else splits)
        if array.ndim != 1 or not (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
            raise InvalidRequest(name, f"splits must be a list of integers, got {splits!r}")
        return [int(part) for part in array]

    def make_splits(self, splits: Sequence[int], given: object) -> Array:
        """Return an int32 array, of the kind of the given splits."""
        return _kind(mx.nd.array(splits, dtype="int32"), given)

    def dtype(self, tensor: Array) -> object:
        """Return the array's dtype, a type of NumPy."""
        return tensor.dtype

    def is_floating(self, tensor: Array) -> bool:
        """Return whether the dtype is a floating-point one."""
        return bool(np.issubdtype(tensor.dtype, np.floating))

    def cast(self, tensor: Array, dtype: object) -> Array:
        """Return a copy in `dtype`."""
        return tensor.astype(dtype)


def _address(array: Array) -> int:
    """Return where an array's values begin, in row-major order; it must be computed."""
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    return address.value or 0


def _kind(array: Array, like: object) -> Array:
    """Return the array as one of MXNet's NumPy interface if `like` is one."""
    return array.as_np_ndarray() if isinstance(like, mx.np.ndarray) else array
