"""Decoding of images by Pillow: of single ones, and of the columns in which Hugging Face stores them."""

import io
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from farandole.data.formats.schemas import is_binary, is_text
from farandole.data.loading.values import Array, empty_aligned
from farandole.errors import DataError
from farandole.extras import importing

_ORIENTATION, _BITS_PER_SAMPLE = 0x0112, 0x0102  # tags of EXIF and TIFF
_TRANSPOSED = range(5, 9)  # orientations that exchange width and height
_WIDE = ("I;16", "I;16B", "I;16L", "I;16N")
_WIDE_AS_INTEGERS = ("PNG", "PPM")  # whose gray images of 16 bits have mode "I"; of PNG only before Pillow 11


def decode_image(data: bytes, column: str, size: tuple[int, int] | None, *, orient: bool = True) -> Array:
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
                # JPEG decodes faster at a reduced size.
                opened.draft("RGB", size if turned in _TRANSPOSED else size[::-1])
            opened.load()
            image = ImageOps.exif_transpose(opened) if turned != 1 else opened
            wide = opened.mode in _WIDE or (opened.mode == "I" and opened.format in _WIDE_AS_INTEGERS)
            if opened.mode in ("I", "F") and not wide:
                problem = f"its numbers have no known range (Pillow's mode {opened.mode})"
                raise ValueError(f"{problem}; scale them to 8 bits, or in decode")
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


def is_image(kind: pa.DataType) -> bool:
    """Return whether `kind` is the struct of bytes and path in which Hugging Face stores an image."""
    if not pa.types.is_struct(kind) or {child.name for child in kind} != {"bytes", "path"}:
        return False
    return is_binary(kind.field("bytes").type) and is_text(kind.field("path").type)


def decode_images(
    column: pa.StructArray, name: str, shape: tuple[int, int], *, resize: bool, orient: bool
) -> NDArray[np.uint8]:
    """Return the images of column `name`, whose height and width are `shape`, as one array; raises as `images_in`."""
    made: NDArray[np.uint8] = empty_aligned((len(column), *shape, 3), np.dtype(np.uint8))
    for row, image in enumerate(images_in(column, name, shape if resize else None, orient=orient)):
        if image.shape != made.shape[1:]:
            problem = f"row {row} has height and width {image.shape[:2]}, and the first row {shape}"
            raise DataError(name, f"{problem}; resize them: images={{'{name}': (height, width)}}")
        made[row] = image
    return made


def images_in(column: pa.StructArray, name: str, size: tuple[int, int] | None, *, orient: bool) -> Iterator[Array]:
    """Yield the images of column `name`, whose type `is_image`, as `decode_image` returns them.

    Raises `DataError` naming the row, also for an image without bytes."""
    parts = dict(zip((child.name for child in column.type), column.flatten(), strict=True))
    for row, (data, path) in enumerate(zip(parts["bytes"], parts["path"], strict=True)):
        at = f"row {row} ({path})" if path.is_valid else f"row {row}"
        if not data.is_valid:
            raise DataError(name, f"{at} has no bytes, only a path; read image files with farandole.data.files")
        try:
            yield decode_image(data.as_py(), name, size, orient=orient)
        except DataError as error:
            raise DataError(name, f"{at} {error.problem}; if it is no image, leave the column out") from error
