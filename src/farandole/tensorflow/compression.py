"""Compression of floating-point tensors."""

from dataclasses import dataclass

import tensorflow as tf

from farandole.core.operations.compression import BrainCompression, ByInt8, Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FloatCompressor"]


@dataclass(frozen=True)
class FloatCompressor:
    """Compressor that sends floating tensors as `wire_dtype` and leaves other tensors unchanged."""

    wire_dtype: tf.DType

    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType | None]:
        """Return the tensor as `wire_dtype`, and its original dtype."""
        if not tensor.dtype.is_floating or tensor.dtype == self.wire_dtype:
            return tensor, None
        return tf.cast(tensor, self.wire_dtype), tensor.dtype

    def decompress(self, tensor: tf.Tensor, ctx: tf.DType | None) -> tf.Tensor:
        """Return the tensor in its original dtype."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class Int8Compressor(FloatCompressor, ByInt8):
    """See `farandole.core.operations.compression.Int8Compressor`."""


Compression: BrainCompression[tf.Tensor] = BrainCompression(
    none=NoneCompressor(),
    fp16=FloatCompressor(tf.float16),
    bf16=FloatCompressor(tf.bfloat16),
    int8=Int8Compressor(tf.float32),
)
