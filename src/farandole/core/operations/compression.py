"""Compressors, which make tensors smaller before an allreduce and restore them after it."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from farandole.core.operations.adapter import Adapter

__all__ = ["CastCompressor", "Compression", "Compressor", "NoneCompressor"]

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


@dataclass(frozen=True)
class Compression(Generic[T]):
    """The compressors of one framework: `Compression.none` and `Compression.fp16`."""

    none: Compressor[T]
    fp16: Compressor[T]
