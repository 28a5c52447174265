"""torch tensors on "cuda" in the memory of the stand-in's devices, for builds of PyTorch without CUDA.

Operations run on the CPU with copies; their results are written later, in the thread's stream. A missing wait therefore
leads to a wrong result."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from helpers.device_arrays import CUDA, ExchangeArray, _Device, _streams, _Tensor, _Type, current_stream
from helpers.stand_in_cuda import load

KINDS = {torch.bool: 6, torch.bfloat16: 4}


class _Block:
    """Device memory, freed after the work of the streams that use it."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.nbytes, self.device = max(1, nbytes), device
        self.address: int = load().stand_in_allocate(self.nbytes)
        assert self.address, "the stand-in has no memory left"
        self._made_in, self._used_in = current_stream(device), set[int]()

    def read(self) -> torch.Tensor:
        """Wait for the work that is now in this thread's stream; return the bytes."""
        values = torch.empty(self.nbytes, dtype=torch.uint8)
        load().stand_in_read(self.address, values.data_ptr(), self.nbytes, current_stream(self.device))
        return values

    def write(self, values: torch.Tensor) -> None:
        """Write bytes in the thread's stream, without waiting."""
        data = values.numpy().tobytes()
        load().stand_in_write(self.address, data, len(data), current_stream(self.device))

    def note_use(self, stream: int) -> None:
        self._used_in.add(stream)

    def __del__(self) -> None:
        for stream in self._used_in:
            load().stand_in_order(self._made_in, stream)
        load().stand_in_free(self.address, self._made_in)


class DeviceTensor(torch.Tensor):
    """Tensor that claims to be on CUDA. `shadow`, a tensor on "meta", has its shape and type."""

    __dlpack_c_exchange_api__ = ExchangeArray.__dlpack_c_exchange_api__
    block: _Block
    shadow: torch.Tensor

    @staticmethod
    def __new__(cls: Any, shadow: torch.Tensor, block: _Block) -> "DeviceTensor":
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            shadow.shape,
            strides=shadow.stride(),
            storage_offset=shadow.storage_offset(),
            dtype=shadow.dtype,
            device=torch.device("cuda", block.device),
        )
        made.shadow, made.block = shadow, block
        return made

    @staticmethod
    def of(values: torch.Tensor, device: int = 0) -> "DeviceTensor":
        """Return a tensor that will hold `values`."""
        values = values.contiguous()
        block = _Block(values.nbytes, device)
        if values.numel():
            block.write(values.flatten().view(torch.uint8))
        return DeviceTensor(torch.empty_like(values, device="meta"), block)

    def read(self) -> torch.Tensor:
        """Wait for the work that is now in this thread's stream; return the values."""
        return _on_cpu(self, {}).clone()

    def tolist(self) -> Any:
        return self.read().tolist()

    def data_ptr(self) -> int:
        return self.block.address + int(self.shadow.storage_offset()) * self.shadow.itemsize

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self.block.address)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> "DeviceTensor":
        # torch's own copy sets CUDA's device first, which fails in this build
        _run(torch.ops.aten.copy_.default, (self, source), {})
        return self

    def record_stream(self, stream: Any) -> None:
        self.block.note_use(stream.handle)

    def describe(self, tensor: _Tensor) -> None:
        """Fill in DLPack's structure."""
        self._shape = (ctypes.c_int64 * max(1, self.dim()))(*self.shape)
        tensor.data, tensor.device, tensor.ndim = self.data_ptr(), _Device(CUDA, self.block.device), self.dim()
        kind = KINDS.get(self.dtype, 2 if self.dtype.is_floating_point else 0 if self.dtype.is_signed else 1)
        tensor.dtype = _Type(kind, 8 * self.itemsize, 1)
        tensor.shape, tensor.strides, tensor.byte_offset = self._shape, None, 0

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


def _on_cpu(tensor: DeviceTensor, copies: dict[_Block, torch.Tensor]) -> torch.Tensor:
    if tensor.block not in copies:
        copies[tensor.block] = tensor.block.read()
    raw, shadow = copies[tensor.block], tensor.shadow
    whole = raw[: raw.numel() // shadow.itemsize * shadow.itemsize].view(shadow.dtype)
    return whole.as_strided(shadow.shape, shadow.stride(), shadow.storage_offset())


def _tensors(values: Any) -> list[DeviceTensor]:
    found: list[DeviceTensor] = []
    tree_map(lambda each: found.append(each) if isinstance(each, DeviceTensor) else None, values)
    return found


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    device = _tensors((args, kwargs))[0].block.device
    if _is_view(func):
        whole = args[0]
        shadow = func(whole.shadow, *args[1:], **kwargs)
        if isinstance(shadow, torch.Tensor):
            return DeviceTensor(shadow, whole.block)
        return [DeviceTensor(each, whole.block) for each in shadow]
    copies: dict[_Block, torch.Tensor] = {}
    to_cpu = lambda each: _on_cpu(each, copies) if isinstance(each, DeviceTensor) else each  # noqa: E731
    here = {"device": "cpu"} if "device" in kwargs else {}
    elsewhere = here and torch.device(kwargs["device"]).type == "cpu"
    result = func(*tree_map(to_cpu, args), **{**tree_map(to_cpu, kwargs), **here})
    changed = [
        given
        for given, formal in zip(args, func._schema.arguments, strict=False)
        if formal.alias_info is not None and formal.alias_info.is_write
    ]
    for tensor in _tensors(changed):
        tensor.block.write(copies[tensor.block])
    if changed and len(changed) == 1 and isinstance(changed[0], torch.Tensor):
        return changed[0]
    if elsewhere:
        return result
    return tree_map(lambda each: DeviceTensor.of(each, device) if isinstance(each, torch.Tensor) else each, result)


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write


class _Event:
    """Event: the point that a stream has reached."""

    def __init__(self, device: int, after: int) -> None:
        self.stream = load().stand_in_stream(device)
        load().stand_in_order(self.stream, after)


class _Stream:
    """Stream with the interface of torch.cuda."""

    def __init__(self, device: torch.device, handle: int | None = None) -> None:
        self.number = device.index or 0
        self.handle = load().stand_in_stream(self.number) if handle is None else handle

    def record_event(self) -> _Event:
        return _Event(self.number, self.handle)

    def wait_event(self, event: _Event) -> None:
        load().stand_in_order(self.handle, event.stream)


@contextlib.contextmanager
def _entered(stream: _Stream) -> Iterator[None]:
    before = current_stream(stream.number)
    _streams.own[stream.number] = stream.handle
    try:
        yield
    finally:
        _streams.own[stream.number] = before


stand_in_for_torch_cuda = SimpleNamespace(
    Stream=_Stream,
    stream=_entered,
    current_stream=lambda device: _Stream(device, current_stream(device.index or 0)),
)


class StandInFuture:
    """Future like torch's with devices: a waiter's streams wait for the streams in which the value was set."""

    def __init__(self, gpus: Sequence[torch.device]) -> None:
        self._gpus, self._set, self._value = gpus, threading.Event(), None
        self._events: list[tuple[torch.device, _Event]] = []
        self._next: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def set_result(self, value: Any) -> None:
        self._value = value
        self._events = [(gpu, stand_in_for_torch_cuda.current_stream(gpu).record_event()) for gpu in self._gpus]
        with self._lock:
            self._set.set()
            following, self._next = self._next, []
        for each in following:
            each()

    def then(self, callback: Callable[["StandInFuture"], Any]) -> "StandInFuture":
        made = StandInFuture(self._gpus)

        def follow() -> None:
            self.wait()
            made.set_result(callback(self))

        with self._lock:
            if not self._set.is_set():
                self._next.append(follow)
                return made
        follow()
        return made

    def value(self) -> Any:
        return self._value

    def wait(self) -> Any:
        assert self._set.wait(60)
        for gpu, event in self._events:
            stand_in_for_torch_cuda.current_stream(gpu).wait_event(event)
        return self._value
