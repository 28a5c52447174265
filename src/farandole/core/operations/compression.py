"""Smaller numbers on the wire: what compresses a tensor before an allreduce and restores it after."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from farandole.core.operations.adapter import Adapter

__all__ = ["CastCompressor", "Compression", "Compressor", "NoneCompressor"]

T = TypeVar("T")


class Compressor(Protocol[T]):
    """Makes a tensor smaller for the wire. Users may write their own, with static methods if they like."""

    def compress(self, tensor: T) -> tuple[T, object]:
        """Return what is reduced, and what `decompress` needs to undo it."""

    def decompress(self, tensor: T, ctx: object) -> T:
        """Return the reduced tensor in its original form."""


class NoneCompressor(Generic[T]):
    """Leaves tensors as they are."""

    def compress(self, tensor: T) -> tuple[T, object]:
        """Return the tensor itself."""
        return tensor, None

    def decompress(self, tensor: T, ctx: object) -> T:
        """Return the tensor itself."""
        return tensor


@dataclass(frozen=True)
class CastCompressor(Generic[T]):
    """Sends floating tensors as `wire_dtype`; leaves all others as they are."""

    adapter: Adapter[T]
    wire_dtype: object

    def compress(self, tensor: T) -> tuple[T, object]:
        """Return the tensor as `wire_dtype`, and the dtype it had."""
        dtype = self.adapter.dtype(tensor)
        if not self.adapter.is_floating(tensor) or dtype == self.wire_dtype:
            return tensor, None
        return self.adapter.cast(tensor, self.wire_dtype), dtype

    def decompress(self, tensor: T, ctx: object) -> T:
        """Return the tensor in the dtype it had."""
        return tensor if ctx is None else self.adapter.cast(tensor, ctx)


@dataclass(frozen=True)
class Compression(Generic[T]):
    """The compressors of one framework, as `Compression.none`, `Compression.fp16`."""

    none: Compressor[T]
    fp16: Compressor[T]
