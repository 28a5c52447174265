"""Arrays in the memory of the stand-in's devices, with the operations of a binding.

They support DLPack as CUDA tensors do: `ProtocolArray` with `__dlpack__(stream=...)`, `ExchangeArray` with the C
exchange interface, which also returns a thread's current stream. Their work is done later, in the thread's stream."""

import ctypes
import math
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

import farandole.numpy
from farandole.core.operations.adapter import DeviceResult
from farandole.core.operations.compression import CastCompressor, Compression, Int8Compressor, NoneCompressor
from farandole.core.operations.ops import Operations
from farandole.core.operations.requests import Requests
from farandole.errors import InvalidRequest
from helpers.stand_in_cuda import load

Array = npt.NDArray[Any]

CUDA = 2  # DLPack's device type
CODES = {"i": 0, "u": 1, "f": 2, "b": 6}  # DLPack's type codes, by NumPy's kinds


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("number", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Streams(threading.local):
    """The streams of a thread, by device."""

    def __init__(self) -> None:
        self.own: dict[int, int] = {}
        self.default: set[int] = set()


_streams = _Streams()


def current_stream(device: int) -> int:
    """Return the stream in which this thread works on `device`."""
    if device not in _streams.own:
        _streams.own[device] = load().stand_in_stream(device)
    return _streams.own[device]


def use_default_stream(device: int) -> None:
    """Let this thread work in the device's default stream, whose handle is null."""
    _streams.own[device] = load().stand_in_default_stream(device)
    _streams.default.add(device)


class DeviceArray:
    """Dense array on a device. Work on it is done later, in the thread's stream."""

    def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike, device: int = 0) -> None:
        self.shape, self.dtype, self.device = tuple(shape), np.dtype(dtype), device
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self.address: int = load().stand_in_allocate(self.nbytes)
        assert self.address, "the stand-in has no memory left"
        self._made_in = current_stream(device)
        self._extents = (ctypes.c_int64 * max(1, len(self.shape)))(*self.shape)

    @classmethod
    def of(cls, values: Array, device: int = 0) -> Self:
        """Return an array that will hold `values`."""
        made = cls(values.shape, values.dtype, device)
        made.fill(values)
        return made

    def fill(self, values: Array) -> None:
        """Write `values` in the thread's stream, without waiting."""
        data = np.ascontiguousarray(values).tobytes()
        load().stand_in_write(self.address, data, len(data), current_stream(self.device))

    def read(self) -> Array:
        """Wait for the work that is now in this thread's stream; return the values."""
        values = np.empty(self.shape, self.dtype)
        load().stand_in_read(self.address, values.ctypes.data, self.nbytes, current_stream(self.device))
        return values

    def __iadd__(self, number: int) -> Self:
        self.fill(self.read() + self.dtype.type(number))
        return self

    def __getitem__(self, key: Any) -> Any:
        return self.read()[key]

    def __float__(self) -> float:
        return float(self.read())

    def __len__(self) -> int:
        return self.shape[0]

    def __del__(self) -> None:
        load().stand_in_free(self.address, self._made_in)

    def describe(self, tensor: _Tensor) -> None:
        """Fill in DLPack's structure."""
        tensor.data, tensor.device, tensor.ndim = self.address, _Device(CUDA, self.device), len(self.shape)
        tensor.dtype = _Type(CODES[self.dtype.kind], 8 * self.dtype.itemsize, 1)
        tensor.shape, tensor.strides, tensor.byte_offset = self._extents, None, 0


_python = ctypes.PyDLL(None)  # not ctypes.pythonapi, where frameworks declare the same functions
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_GetPointer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
TENSOR, INTERFACE = b"dltensor", b"dlpack_exchange_api"  # kept: a capsule has a pointer to its name
_exported: dict[int, tuple[_Managed, DeviceArray]] = {}


def _forget(capsule: int) -> None:
    del _exported[_python.PyCapsule_GetPointer(capsule, TENSOR)]


_FORGET = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_forget)


class ProtocolArray(DeviceArray):
    """Array whose consumer passes the stream that waits for its values."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device

    def __dlpack__(self, *, stream: int | None = None) -> object:
        if stream is not None:
            load().stand_in_order(stream, current_stream(self.device))
        managed = _Managed()
        self.describe(managed.tensor)
        address = ctypes.addressof(managed)
        _exported[address] = managed, self
        return _python.PyCapsule_New(address, TENSOR, ctypes.cast(_FORGET, ctypes.c_void_p))


def _describe(array: DeviceArray, tensor: Any) -> int:
    array.describe(tensor.contents)
    return 0


def _tell_stream(kind: int, device: int, stream: Any) -> int:
    assert kind == CUDA
    stream[0] = None if device in _streams.default else current_stream(device)
    return 0


_DESCRIBE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Tensor))(_describe)
_TELL_STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))(
    _tell_stream
)


class _Exchange(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("unused", ctypes.c_void_p * 3),
        ("describe", ctypes.c_void_p),
        ("tell_stream", ctypes.c_void_p),
    )


_exchange = _Exchange(
    1,
    3,
    None,
    (ctypes.c_void_p * 3)(),
    ctypes.cast(_DESCRIBE, ctypes.c_void_p),
    ctypes.cast(_TELL_STREAM, ctypes.c_void_p),
)


class ExchangeArray(DeviceArray):
    """Array whose type has DLPack's C exchange interface."""

    __dlpack_c_exchange_api__: ClassVar[object] = _python.PyCapsule_New(ctypes.addressof(_exchange), INTERFACE, None)


class _Adapter:
    """Adapter of the arrays for the engine."""

    name = "device"
    own_type = None

    def __init__(self, kind: type[DeviceArray]) -> None:
        self.kind = kind

    def check(self, tensor: DeviceArray, name: str) -> None:
        if not isinstance(tensor, (DeviceArray, np.ndarray)):
            raise TypeError(f"'{name}': expected a device array, got {type(tensor).__name__}")

    overwrite = check

    def check_each(self, tensors: Sequence[DeviceArray], name: str) -> None:
        for tensor in tensors:
            self.check(tensor, name)

    overwrite_each = check_each

    def refusal(self, tensor: DeviceArray) -> str | None:
        return None

    def dense(self, tensor: DeviceArray, name: str, write: bool) -> DeviceArray:
        return tensor

    def restore(self, values: DeviceArray, tensor: DeviceArray, write: bool) -> DeviceArray:
        return values

    def empty_like(self, tensor: DeviceArray) -> DeviceArray:
        return self.kind(tensor.shape, tensor.dtype, tensor.device)

    def adopt(self, result: object, like: DeviceArray) -> DeviceArray:
        assert isinstance(result, DeviceResult)
        made = self.kind(result.shape, like.dtype, like.device)
        result.copy_to(made)
        return made

    def read_splits(self, splits: object, name: str) -> list[int]:
        array = splits.read() if isinstance(splits, DeviceArray) else np.asarray(splits)
        if array.ndim != 1 or not (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
            raise InvalidRequest(name, f"splits must be a list of integers, got {splits!r}")
        return [int(part) for part in array]

    def make_splits(self, splits: Sequence[int], given: object) -> DeviceArray:
        return self.kind.of(np.array(splits, np.int32))

    def dtype(self, tensor: DeviceArray) -> object:
        return tensor.dtype

    def is_floating(self, tensor: DeviceArray) -> bool:
        return bool(np.issubdtype(tensor.dtype, np.floating))

    def cast(self, tensor: DeviceArray, dtype: Any) -> DeviceArray:
        return self.kind.of(tensor.read().astype(dtype), tensor.device)


def binding_of(kind: type[DeviceArray]) -> ModuleType:
    """Return a module with the functions of a binding for arrays of this type."""
    adapter = _Adapter(kind)
    module = ModuleType(f"binding of {kind.__name__}")
    module.__dict__.update({name: getattr(farandole.numpy, name) for name in farandole.numpy.__all__})
    operations: Operations[DeviceArray] = Operations(Requests(adapter))
    module.__dict__.update({name: getattr(operations, name) for name in dir(operations) if name in module.__dict__})
    module.__dict__["Compression"] = Compression(
        none=NoneCompressor(),
        fp16=CastCompressor(adapter, np.float16),
        int8=Int8Compressor(adapter, np.float32),
    )
    return module
