"""Smaller floats on the wire."""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from farandole.core.compression import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FloatCompressor"]


@dataclass(frozen=True)
class FloatCompressor:
    """Sends floating tensors as `wire_dtype`; leaves all others as they are."""

    wire_dtype: tf.DType

    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor as `wire_dtype`, and the dtype it had."""
        if not tensor.dtype.is_floating or tensor.dtype == self.wire_dtype:
            return tensor, None
        return tf.cast(tensor, self.wire_dtype), tensor.dtype

    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the tensor in the dtype it had."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class Compression:
    """The compressors that there are."""

    none: Compressor[tf.Tensor] = NoneCompressor()
    fp16: Compressor[tf.Tensor] = FloatCompressor(tf.float16)
    bf16: Compressor[tf.Tensor] = FloatCompressor(tf.bfloat16)
