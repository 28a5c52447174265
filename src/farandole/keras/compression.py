"""Smaller gradients on the wire, on every backend of Keras."""

import keras

from farandole.core.compression import Compression as Compressors
from farandole.core.compression import NoneCompressor
from farandole.keras.backend import Tensor

__all__ = ["Compression"]

HALF = "float16"


class _HalfCompressor:
    """Sends floating tensors as halves; leaves all others as they are."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, object]:
        """Return the tensor as halves, and the dtype it had."""
        dtype: str = keras.backend.standardize_dtype(tensor.dtype)
        if dtype == HALF or not keras.backend.is_float_dtype(dtype):
            return tensor, None
        return keras.ops.cast(tensor, HALF), dtype

    def decompress(self, tensor: Tensor, ctx: object) -> Tensor:
        """Return the tensor in the dtype it had."""
        return tensor if ctx is None else keras.ops.cast(tensor, ctx)


Compression: Compressors[Tensor] = Compressors(none=NoneCompressor(), fp16=_HalfCompressor())
