"""Compression of gradients on every backend of Keras."""

import keras

from farandole.core.operations.compression import Compression as Compressors
from farandole.core.operations.compression import NoneCompressor
from farandole.keras.backend import Tensor

__all__ = ["Compression"]

HALF = "float16"


class _HalfCompressor:
    """Compressor that sends floating tensors as float16 and leaves other tensors unchanged."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, object]:
        """Return the tensor as float16, and its original dtype."""
        dtype: str = keras.backend.standardize_dtype(tensor.dtype)
        if dtype == HALF or not keras.backend.is_float_dtype(dtype):
            return tensor, None
        return keras.ops.cast(tensor, HALF), dtype

    def decompress(self, tensor: Tensor, ctx: object) -> Tensor:
        """Return the tensor in its original dtype."""
        return tensor if ctx is None else keras.ops.cast(tensor, ctx)


Compression: Compressors[Tensor] = Compressors(none=NoneCompressor(), fp16=_HalfCompressor())
