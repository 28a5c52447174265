"""Compression of gradients on every backend of Keras."""

from dataclasses import dataclass

import keras

from farandole.core.operations.compression import BrainCompression, ByInt8, NoneCompressor
from farandole.keras.backend import Tensor


@dataclass(frozen=True)
class _CastCompressor:
    """Compressor that sends floating tensors as `wire_dtype` and leaves other tensors unchanged."""

    wire_dtype: str

    def compress(self, tensor: Tensor) -> tuple[Tensor, object]:
        """Return the tensor as `wire_dtype`, and its original dtype."""
        dtype: str = keras.backend.standardize_dtype(tensor.dtype)
        if dtype == self.wire_dtype or not keras.backend.is_float_dtype(dtype):
            return tensor, None
        return keras.ops.cast(tensor, self.wire_dtype), dtype

    def decompress(self, tensor: Tensor, ctx: object) -> Tensor:
        """Return the tensor in its original dtype."""
        return tensor if ctx is None else keras.ops.cast(tensor, ctx)


class _Int8Compressor(_CastCompressor, ByInt8):
    """See `farandole.core.operations.compression.Int8Compressor`."""


Compression: BrainCompression[Tensor] = BrainCompression(
    none=NoneCompressor(),
    fp16=_CastCompressor("float16"),
    bf16=_CastCompressor("bfloat16"),
    int8=_Int8Compressor("float32"),
)
