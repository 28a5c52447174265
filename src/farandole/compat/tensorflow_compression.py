"""The compressors as the classes of `horovod.tensorflow.compression`."""

from farandole.compat.compression import Compressor
from farandole.tensorflow import Compression

__all__ = ["FP16Compressor", "NoneCompressor"]


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    compress = staticmethod(Compression.none.compress)
    decompress = staticmethod(Compression.none.decompress)


class FP16Compressor(Compressor):
    """Sends floating tensors as float16."""

    compress = staticmethod(Compression.fp16.compress)
    decompress = staticmethod(Compression.fp16.decompress)
