"""Compressors, which make tensors smaller before an allreduce and restore them after it."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from farandole.core.operations.adapter import Adapter
from farandole.core.operations.kinds import ALLREDUCE, NAMES
from farandole.core.operations.reduction import Average, AverageByInt8, Sum, SumByInt8
from farandole.errors import InvalidRequest, UnsupportedReduction

T = TypeVar("T")


class Compressor(Protocol[T]):
    """Makes tensors smaller for an allreduce. Users can write their own, also with static methods."""

    def compress(self, tensor: T) -> tuple[T, object]:
        """Return the tensor to reduce, and the context that `decompress` takes."""

    def decompress(self, tensor: T, ctx: object) -> T:
        """Return the reduced tensor in its original form."""


class NoneCompressor(Generic[T]):
    """Compressor that leaves tensors unchanged."""

    def compress(self, tensor: T) -> tuple[T, object]:
        """Return the tensor itself."""
        return tensor, None

    def decompress(self, tensor: T, ctx: object) -> T:
        """Return the tensor itself."""
        return tensor


@dataclass(frozen=True)
class CastCompressor(Generic[T]):
    """Compressor that sends floating-point tensors as `wire_dtype` and leaves others unchanged."""

    adapter: Adapter[T]
    wire_dtype: object

    def compress(self, tensor: T) -> tuple[T, object]:
        """Return the tensor as `wire_dtype`, and its original dtype."""
        dtype = self.adapter.dtype(tensor)
        if not self.adapter.is_floating(tensor) or dtype == self.wire_dtype:
            return tensor, None
        return self.adapter.cast(tensor, self.wire_dtype), dtype

    def decompress(self, tensor: T, ctx: object) -> T:
        """Return the tensor in its original dtype."""
        return tensor if ctx is None else self.adapter.cast(tensor, ctx)


class ByInt8:
    """Mark of a compressor whose tensors the engine itself sends as blocks of int8; it only casts them to float32."""


class Int8Compressor(CastCompressor[T], ByInt8):
    """Compressor that sends floating-point tensors as int8, with a float32 scale for each 256 values.

    It serves allreduces by Average and Sum, which round each value twice: on the rank, and the sum."""


def wire_op(compression: object, op: int, name: str | None, kind: int = ALLREDUCE) -> int:
    """Return the operator that the engine gets for a reduction by `op`.

    Raises `UnsupportedReduction` if `compression` sends int8, and this is no allreduce by Average or Sum, and
    `InvalidRequest` if it is no compressor."""
    if not isinstance(compression, ByInt8):
        if not callable(getattr(compression, "compress", None)):
            text = f"compression is {compression!r}, which is no compressor; give Compression.fp16, for example"
            raise InvalidRequest(name or NAMES[kind], text)
        return op
    if kind != ALLREDUCE or op not in (Average, Sum):
        raise UnsupportedReduction(name or NAMES[kind], "Compression.int8 supports allreduce by Average and Sum only")
    return AverageByInt8 if op == Average else SumByInt8


@dataclass(frozen=True)
class Compression(Generic[T]):
    """The compressors of one framework: `Compression.none`, `Compression.fp16` and `Compression.int8`."""

    none: Compressor[T]
    fp16: Compressor[T]
    int8: Compressor[T]


@dataclass(frozen=True)
class BrainCompression(Compression[T]):
    """The compressors of a framework that has bfloat16, which NumPy and MXNet lack: `Compression.bf16` too."""

    bf16: Compressor[T]
