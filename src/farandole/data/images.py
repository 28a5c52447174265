"""Decoding of images by Pillow."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farandole.errors import DataError
from farandole.extras import importing

__all__ = ["decode_image"]


def decode_image(data: bytes, name: str, size: tuple[int, int] | None) -> NDArray[Any]:
    """Return an image as uint8[height, width, 3], resized to `size` = (height, width) if given.

    Raises `DataError` with `name` if it cannot be decoded."""
    with importing(__name__):
        from PIL import Image, UnidentifiedImageError
    try:
        with Image.open(io.BytesIO(data)) as opened:
            if size is not None:
                opened.draft("RGB", (size[1], size[0]))  # JPEG decodes faster at a reduced size
            opened.load()
            image = opened if opened.mode == "RGB" else opened.convert("RGB")  # `convert` always copies
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise DataError("image", f"{name} cannot be decoded: {error}") from error
    if size is not None and image.size != (size[1], size[0]):
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(image)
