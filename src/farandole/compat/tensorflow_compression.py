"""The compressors as the classes of `horovod.tensorflow.compression`."""

import tensorflow as tf

from farandole.compat.compression import Compressor
from farandole.tensorflow import Compression


class NoneCompressor(Compressor[tf.Tensor]):
    """Compressor that leaves tensors unchanged."""

    compress = staticmethod(Compression.none.compress)
    decompress = staticmethod(Compression.none.decompress)


class FP16Compressor(Compressor[tf.Tensor]):
    """Compressor that sends floating-point tensors as float16."""

    compress = staticmethod(Compression.fp16.compress)
    decompress = staticmethod(Compression.fp16.decompress)
