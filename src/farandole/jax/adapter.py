"""Adapter for JAX arrays outside of jit, where they have values."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from farandole.core.operations.adapter import DeviceResult
from farandole.errors import InvalidRequest

# Shape and dtype are not known to the type checker; they are checked when an operation is called.
Array: TypeAlias = jax.Array

_DTYPES = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    | {"float16", "bfloat16", "float32", "float64"}
)


def is_traced(array: object) -> bool:
    """Return whether an array is a tracer, which has no values yet."""
    return isinstance(array, jax.core.Tracer)


class JaxAdapter:
    """Adapter for arrays in the memory of one device, a CPU or a GPU. The engine writes only to arrays that it has just
    made."""

    name = "jax"
    own_type = None

    def check(self, tensor: Array, name: str) -> None:
        """Refuse objects other than arrays on one CPU or GPU, and tracers. Blocks until the values are computed."""
        if not isinstance(tensor, jax.Array):
            raise TypeError(f"'{name}': expected a jax.Array, got {type(tensor).__name__}")
        if is_traced(tensor):
            raise InvalidRequest(name, "this cannot be called inside jax.jit or another transformation")
        if elsewhere := _elsewhere(tensor):
            raise InvalidRequest(name, elsewhere)
        tensor.block_until_ready()

    def overwrite(self, tensor: Array, name: str) -> None:
        """Raise `InvalidRequest`, because JAX arrays are immutable."""
        raise InvalidRequest(name, "JAX's arrays cannot be changed in place; use the function that returns a new one")

    def check_each(self, tensors: Sequence[Array], name: str) -> None:
        """Check each tensor as `check` does."""
        for tensor in tensors:
            self.check(tensor, name)

    def overwrite_each(self, tensors: Sequence[Array], name: str) -> None:
        """Refuse each tensor as `overwrite` does."""
        for tensor in tensors:
            self.overwrite(tensor, name)

    def refusal(self, tensor: Array) -> str | None:
        """Return why the engine cannot use the array, or None."""
        return _elsewhere(tensor) or unsupported(tensor)

    def dense(self, tensor: Array, name: str, write: bool) -> Array:
        """Return the array, or a copy in row-major order if it has another layout."""
        return tensor if np.asarray(tensor).flags.c_contiguous else tensor.copy().block_until_ready()

    def restore(self, values: Array, tensor: Array, write: bool) -> Array:
        """Return the values: arrays are not written to."""
        return values

    def empty_like(self, tensor: Array) -> Array:
        """Return a new array for the engine to write to."""
        return _empty(tensor.shape, tensor)

    def adopt(self, result: object, like: Array) -> Array:
        """Return an array over the engine's memory, or a copy on the device of `like` if that is another one."""
        if isinstance(result, DeviceResult):
            made = _empty(result.shape, like)
            result.copy_to(made)
            return made
        with _wide(like.dtype):
            made, device = jnp.from_dlpack(result), _device_of(like)
            return made if _device_of(made) == device else jax.device_put(made, device)

    def read_splits(self, splits: object, name: str) -> list[int]:
        """Read a list or an integer array of one dimension."""
        if is_traced(splits):
            raise InvalidRequest(name, "splits must be known when a program is traced; give a list of integers")
        array = np.asarray(splits)
        if array.ndim != 1 or not (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
            raise InvalidRequest(name, f"splits must be a list of integers, got {splits!r}")
        return [int(part) for part in array]

    def make_splits(self, splits: Sequence[int], given: object) -> Array:
        """Return an int32 array."""
        return jnp.array(splits, jnp.int32)

    def dtype(self, tensor: Array) -> object:
        """Return the array's dtype."""
        return tensor.dtype

    def is_floating(self, tensor: Array) -> bool:
        """Return whether the dtype is a floating-point one."""
        return bool(jnp.issubdtype(tensor.dtype, jnp.floating))

    def cast(self, tensor: Array, dtype: object) -> Array:
        """Return the array in `dtype`; differentiable."""
        return tensor.astype(dtype)  # type: ignore[arg-type]  # the dtype came from `dtype` above


def unsupported(tensor: Array) -> str | None:
    """Return why the engine cannot use the dtype of an array or a tracer, or None."""
    if tensor.dtype.name in _DTYPES:
        return None
    return f"dtype {tensor.dtype} is not supported; use one of {', '.join(sorted(_DTYPES))}"


def numbers_of(array: Array) -> Array:
    """Return the integers that random keys are made of, and any other array as it is."""
    return jax.random.key_data(array) if _holds_keys(array) else array


def keys_of(numbers: Array, like: Array) -> Array:
    """Return `numbers` as random keys of the kind of `like` if that holds keys."""
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(like)) if _holds_keys(like) else numbers


def _holds_keys(array: Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def _elsewhere(tensor: Array) -> str | None:
    """Return why the place of an array keeps the engine from it, or None."""
    devices: set[jax.Device] = tensor.sharding.device_set
    if len(devices) == 1 and all(device.platform in ("cpu", "gpu") for device in devices):
        return None
    shown = ", ".join(sorted(map(str, devices)))
    return f"the array is on {shown}; it has to be on one CPU or GPU, see jax.device_put"


def _device_of(array: Array) -> jax.Device:
    """Return the device of an array that is on one."""
    device: jax.Device = next(iter(array.sharding.device_set))
    return device


def _empty(shape: tuple[int, ...], like: Array) -> Array:
    """Return a new array on the device of `like` for the engine to write to."""
    device = _device_of(like)
    with _wide(like.dtype):
        made = jnp.empty(shape, like.dtype, device=None if device.platform == "cpu" else device)
    return made.block_until_ready()


def allow_64_bits() -> AbstractContextManager[object]:
    """Return a context in which JAX makes arrays of 64 bits, whatever its setting is."""
    # JAX 0.5 has it in jax.experimental, from where later versions have moved it.
    home = jax if hasattr(jax, "enable_x64") else jax.experimental
    context: AbstractContextManager[object] = home.enable_x64(True)
    return context


def _wide(dtype: np.dtype[np.generic]) -> AbstractContextManager[object]:
    """Return a context that allows arrays of `dtype`, because the setting may have changed since the input was made."""
    return allow_64_bits() if dtype.itemsize == 8 else nullcontext()
