"""The compressors as the classes of `horovod.torch.compression`."""

import torch

from farandole.compat.compression import Compressor
from farandole.torch import Compression


class NoneCompressor(Compressor[torch.Tensor]):
    """Compressor that leaves tensors unchanged."""

    compress = staticmethod(Compression.none.compress)
    decompress = staticmethod(Compression.none.decompress)


class FP16Compressor(Compressor[torch.Tensor]):
    """Compressor that sends floating-point tensors as float16."""

    compress = staticmethod(Compression.fp16.compress)
    decompress = staticmethod(Compression.fp16.decompress)
