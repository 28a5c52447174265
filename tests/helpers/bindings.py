"""Bindings for the conformance suite, with functions that make and read their tensors."""

import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

import farandole.numpy

Array = npt.NDArray[Any]

SIZES = (1, 2, 3, 4)
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")


@dataclass(frozen=True)
class Binding:
    """One framework's functions, and conversions between its tensors and NumPy arrays."""

    name: str
    hvd: ModuleType
    make: Callable[[Array, str], Any]  # values, dtype
    read: Callable[[Any], Array]
    floats: tuple[str, ...]
    integers: tuple[str, ...]
    on_device: bool = False  # results may be copied later, in a stream

    @property
    def dtypes(self) -> tuple[str, ...]:
        return (*self.floats, *self.integers)


def _make_numpy(values: Array, dtype: str) -> Array:
    return np.array(values).astype(dtype)


def _numpy() -> Binding:
    floats = tuple(name for name in FLOATS if name != "bfloat16")
    integers = (*INTEGERS, "uint16", "uint32", "uint64")
    return Binding("numpy", farandole.numpy, _make_numpy, np.asarray, floats, integers)


def _torch(device: str = "cpu") -> Binding:
    import torch

    import farandole.torch

    def make(values: Array, dtype: str) -> torch.Tensor:
        kind = getattr(torch, dtype)
        assert isinstance(kind, torch.dtype)
        return torch.from_numpy(np.array(values)).to(kind).to(device)

    def read(tensor: torch.Tensor) -> Array:
        tensor = tensor.detach().cpu()
        array: Array = (tensor.double() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return array

    name = "torch" if device == "cpu" else f"torch-{device}"
    return Binding(name, farandole.torch, make, read, FLOATS, INTEGERS, on_device=device != "cpu")


def _torch_bindings() -> list[Binding]:
    import torch

    return [_torch(), *([_torch("cuda")] if torch.cuda.is_available() else [])]


def _jax() -> Binding:
    import jax
    import jax.numpy as jnp

    import farandole.jax
    from farandole.jax.adapter import allow_64_bits

    def make(values: Array, dtype: str) -> jax.Array:
        with allow_64_bits():
            return jnp.array(np.array(values)).astype(dtype)

    def read(array: jax.Array) -> Array:
        return np.asarray(array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array)

    return Binding("jax", farandole.jax, make, read, FLOATS, INTEGERS)


def _mxnet() -> Binding:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses names that NumPy and Python have deprecated
        import farandole.mxnet
    import mxnet

    def make(values: Array, dtype: str) -> Any:
        with mxnet.util.np_shape(True):
            return mxnet.nd.array(np.array(values), dtype=dtype)

    def read(array: Any) -> Array:
        with mxnet.util.np_shape(True):
            values: Array = array.asnumpy()
        return values

    floats = tuple(name for name in FLOATS if name != "bfloat16")
    return Binding("mxnet", farandole.mxnet, make, read, floats, ("int8", "int32", "int64", "uint8"))


def _device_arrays() -> list[Binding]:
    """Return bindings for arrays in the memory of the stand-in for CUDA, which stays loaded in this process."""
    from helpers.device_arrays import DeviceArray, ExchangeArray, ProtocolArray, binding_of

    def binding(kind: type[DeviceArray]) -> Binding:
        def make(values: Array, dtype: str) -> DeviceArray:
            return kind.of(_make_numpy(values, dtype))

        def read(array: DeviceArray | Array) -> Array:
            return array.read() if isinstance(array, DeviceArray) else array

        plain = _numpy()
        return Binding(kind.__name__, binding_of(kind), make, read, plain.floats, plain.integers, on_device=True)

    return [binding(ProtocolArray), binding(ExchangeArray)]


# The bindings whose framework is installed.
BINDINGS = (
    _numpy(),
    *(_torch_bindings() if importlib.util.find_spec("torch") else []),
    *([_mxnet()] if importlib.util.find_spec("mxnet") else []),
    *(_device_arrays() if os.environ.get("FARANDOLE_TEST_DEVICES") else []),
)

# Bindings with JAX, whose functions change no tensor and have no handles.
FUNCTIONAL = (*BINDINGS, *([_jax()] if importlib.util.find_spec("jax") else []))


def expected(op: int, each: list[Array], dtype: str) -> Array:
    """Return the reduction of all ranks' values, computed by NumPy in wide types."""
    wide = np.stack(each).astype("float64" if dtype in FLOATS else "int64")
    total: Array = wide.sum(0)
    if op == farandole.numpy.Average:
        # Averages of integers are truncated toward zero.
        mean = total / len(each)
        return mean if dtype in FLOATS else np.trunc(mean).astype("int64")
    if op == farandole.numpy.Sum:
        return total
    if op == farandole.numpy.Product:
        product: Array = wide.prod(0)
        return product
    extreme: Array = wide.min(0) if op == farandole.numpy.Min else wide.max(0)
    return extreme


def tolerance(dtype: str) -> float:
    """Return the relative error that a few operations in `dtype` may have."""
    return {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-12}.get(dtype, 0.0)


def scatter_rows(rows: int, size: int) -> list[int]:
    """Return the number of rows that each rank gets from a reducescatter; the first ranks get the remainder."""
    share, extra = divmod(rows, size)
    return [share + (rank < extra) for rank in range(size)]
