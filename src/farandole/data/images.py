"""Decoding of images by Pillow."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farandole.errors import DataError
from farandole.extras import importing

__all__ = ["decode_image"]

_ORIENTATION, _BITS_PER_SAMPLE = 0x0112, 0x0102  # tags of EXIF and TIFF
_TRANSPOSED = range(5, 9)  # orientations that exchange width and height
_WIDE = ("I;16", "I;16B", "I;16L", "I;16N")
_WIDE_AS_INTEGERS = ("PNG", "PPM")  # whose gray images of 16 bits have mode "I"; of PNG only before Pillow 11


def decode_image(data: bytes, column: str, size: tuple[int, int] | None, *, orient: bool = True) -> NDArray[Any]:
    """Return an image as uint8[height, width, 3], resized to `size` = (height, width) if given.

    Of 16 bits per channel the upper eight are kept, transparency is dropped, and of several frames the first is taken.
    With `orient`, the image is turned as its EXIF orientation says. Raises `DataError` for `column` if the image cannot
    be decoded, or has numbers of unknown range: floating-point ones, or integers of 32 bits."""
    with importing(__name__):
        from PIL import Image, ImageOps
    try:
        with Image.open(io.BytesIO(data)) as opened:
            turned = opened.getexif().get(_ORIENTATION, 1) if orient else 1
            if size is not None:
                opened.draft(
                    "RGB", size if turned in _TRANSPOSED else size[::-1]
                )  # JPEG decodes faster at a reduced size
            opened.load()
            image = ImageOps.exif_transpose(opened) if turned != 1 else opened
            wide = opened.mode in _WIDE or (opened.mode == "I" and opened.format in _WIDE_AS_INTEGERS)
            if opened.mode in ("I", "F") and not wide:
                raise ValueError(f"its numbers have no known range (Pillow's mode {opened.mode}); scale them in decode")
            if wide:
                bits = getattr(opened, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))[0]  # TIFF has 12, too
                image = Image.fromarray((np.asarray(image) >> bits - 8).astype(np.uint8))
            image = image if image.mode == "RGB" else image.convert("RGB")  # `convert` always copies
    except Image.DecompressionBombError as error:
        remedy = "if you trust it, raise PIL.Image.MAX_IMAGE_PIXELS"
        raise DataError(column, f"cannot be decoded: {error}; {remedy}") from error
    except Exception as error:  # decoders of damaged images raise errors of any class
        raise DataError(column, f"cannot be decoded: {error}") from error
    if size is not None and image.size != size[::-1]:
        image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.asarray(image)
