"""The compressors as the classes of `horovod.mxnet.compression`."""

from farandole.compat.compression import Compressor
from farandole.mxnet import Compression
from farandole.mxnet.adapter import Array


class NoneCompressor(Compressor[Array]):
    """Compressor that leaves arrays unchanged."""

    compress = staticmethod(Compression.none.compress)
    decompress = staticmethod(Compression.none.decompress)


class FP16Compressor(Compressor[Array]):
    """Compressor that sends floating-point arrays as float16."""

    compress = staticmethod(Compression.fp16.compress)
    decompress = staticmethod(Compression.fp16.decompress)
