"""XLA's custom call on CUDA without XLA: its table of functions, and the frame of one call."""

import ctypes
import struct
from collections.abc import Sequence

import numpy as np

from farandole.core.plugins import address_of, core_table, plugin_path
from farandole.core.process_sets.process_set import global_process_set
from helpers.device_arrays import DeviceArray, current_stream

TYPES = {"float32": 11, "float64": 12, "int32": 4}
EXECUTE, ARRAY, STRING = 3, 1, 4


class CallFailed(Exception):
    """The custom call returned an error: a code and a text."""


class _Head(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extension", ctypes.c_void_p))


class _ErrorCreate(ctypes.Structure):
    _fields_ = (("head", _Head), ("message", ctypes.c_char_p), ("code", ctypes.c_int32))


class _StreamGet(ctypes.Structure):
    _fields_ = (("head", _Head), ("context", ctypes.c_void_p), ("stream", ctypes.c_void_p))


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("head", _Head),
        ("dtype", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class _Buffers(ctypes.Structure):
    _fields_ = (
        ("head", _Head),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )


class _Bytes(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char_p), ("size", ctypes.c_size_t))


class _Array(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int32), ("size", ctypes.c_size_t), ("data", ctypes.c_void_p))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("head", _Head),
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int32)),
        ("names", ctypes.POINTER(ctypes.POINTER(_Bytes))),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
    )


_CREATE_ERROR = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorCreate))
_GET_STREAM = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_StreamGet))


class _Api(ctypes.Structure):
    _fields_ = (
        ("head", _Head),
        ("version", ctypes.c_uint8 * 24),
        ("internal", ctypes.c_void_p),
        ("create_error", _CREATE_ERROR),
        ("after_error", ctypes.c_void_p * 3),
        ("get_stream", _GET_STREAM),
        ("others", ctypes.c_void_p * 12),
    )


class _Frame(ctypes.Structure):
    _fields_ = (
        ("head", _Head),
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int32),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
        ("future", ctypes.c_void_p),
    )


_errors: dict[int, tuple[int, str]] = {}


def _create_error(asked: "ctypes._Pointer[_ErrorCreate]") -> int:
    _errors[len(_errors) + 1] = asked.contents.code, (asked.contents.message or b"").decode()
    return len(_errors)


def _get_stream(asked: "ctypes._Pointer[_StreamGet]") -> None:
    asked.contents.stream = current_stream((asked.contents.context or 0) - 1)


_api = _Api(create_error=_CREATE_ERROR(_create_error), get_stream=_GET_STREAM(_get_stream))


def _buffers(arrays: Sequence[DeviceArray]) -> _Buffers:
    made = [
        _Buffer(_Head(), TYPES[array.dtype.name], array.address, len(array.shape), (ctypes.c_int64 * 8)(*array.shape))
        for array in arrays
    ]
    pointers = (ctypes.POINTER(_Buffer) * max(1, len(made)))(*map(ctypes.pointer, made))
    return _Buffers(_Head(), len(made), None, pointers)


def call(
    kind: int,
    name: str,
    inputs: Sequence[DeviceArray],
    outputs: Sequence[DeviceArray],
    op: int = 1,
    root: int = 0,
    grouped: bool = False,
    postscale: float = 1.0,
) -> None:
    """Make the custom call in this thread's stream. Raises `CallFailed`."""
    library = ctypes.CDLL(str(plugin_path("jax")))
    library.farandole_jax_connect.argtypes = [ctypes.c_void_p]
    assert library.farandole_jax_connect(core_table()) == 0
    bits = [struct.unpack("q", struct.pack("d", factor))[0] for factor in (1.0, postscale)]
    numbers = np.array([*address_of(global_process_set, name), kind, op, root, grouped, *bits], np.int64)
    text = _Bytes(name.encode(), len(name))
    array = _Array(5, len(numbers), numbers.ctypes.data)
    names = [_Bytes(b"name", 4), _Bytes(b"numbers", 7)]
    attributes = _Attributes(
        _Head(),
        2,
        (ctypes.c_int32 * 2)(STRING, ARRAY),
        (ctypes.POINTER(_Bytes) * 2)(*map(ctypes.pointer, names)),
        (ctypes.c_void_p * 2)(ctypes.addressof(text), ctypes.addressof(array)),
    )
    device = inputs[0].device
    frame = _Frame(
        _Head(), ctypes.pointer(_api), device + 1, EXECUTE, _buffers(inputs), _buffers(outputs), attributes, None
    )
    perform = library.farandole_jax_collective_on_cuda
    perform.argtypes, perform.restype = [ctypes.POINTER(_Frame)], ctypes.c_void_p
    failed = perform(ctypes.byref(frame))
    if failed:
        raise CallFailed(*_errors[failed])
