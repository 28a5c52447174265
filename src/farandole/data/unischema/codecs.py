"""Petastorm's codecs: how a field's values are stored in a column of Parquet."""

import io
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.data.loading.values import Array
from farandole.data.unischema.field import DataframeColumnCodec, UnischemaField, fitting, plain
from farandole.errors import DataError
from farandole.extras import importing

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

# Petastorm's names.
__all__ = ["CompressedImageCodec", "CompressedNdarrayCodec", "DataframeColumnCodec", "NdarrayCodec", "ScalarCodec"]

_PNG, _RGB, _RGBA = b"\x89PNG\r\n\x1a\n", 2, 6
_PNG_BITS, _PNG_COLORS = 24, 25  # places in the header


class StoredSparkType:
    """A type of Spark in the schema of a data set that is read: ranks do not load Spark for it."""

    kind = ""  # set in a class for each type

    def loaded(self) -> "DataType":
        """Return Spark's own type."""
        from pyspark.sql import types

        state = {
            name: each.loaded() if isinstance(each, StoredSparkType) else each for name, each in vars(self).items()
        }
        own = getattr(types, type(self).kind)  # what was pickled has no say in it
        made: DataType = own.__new__(own) if "elementType" in state else own()
        vars(made).update(state)
        return made


class ScalarCodec(DataframeColumnCodec):
    """Single numbers, texts and times, in the type `spark_type`."""

    def __init__(self, spark_type: "DataType") -> None:
        self._spark_type = spark_type

    def encode(self, unischema_field: UnischemaField, value: Any) -> Any:
        if unischema_field.shape:
            raise DataError(unischema_field.name, f"has shape {unischema_field.shape}; ScalarCodec stores shape ()")
        return plain(unischema_field, value)

    def decode(self, unischema_field: UnischemaField, value: Any) -> Any:
        kind = unischema_field.numpy_dtype
        if kind is Decimal:
            return Decimal(value)
        return value if isinstance(value, str | bytes) else np.dtype(kind).type(value)

    def spark_dtype(self) -> "DataType":
        kind: DataType | StoredSparkType = self._spark_type
        return kind.loaded() if isinstance(kind, StoredSparkType) else kind


class BytesCodec(DataframeColumnCodec):
    """Arrays, each stored as bytes."""

    def spark_dtype(self) -> "DataType":
        from pyspark.sql.types import BinaryType

        return BinaryType()


class NdarrayCodec(BytesCodec):
    """Arrays in NumPy's format, as `numpy.save` writes it."""

    def encode(self, unischema_field: UnischemaField, value: Any) -> bytearray:
        target = io.BytesIO()
        np.save(target, fitting(unischema_field, value), allow_pickle=False)
        return bytearray(target.getvalue())

    def decode(self, unischema_field: UnischemaField, value: bytes) -> Array:
        return np.asarray(np.load(io.BytesIO(value), allow_pickle=False))


class CompressedNdarrayCodec(BytesCodec):
    """Arrays in NumPy's compressed format, as `numpy.savez_compressed` writes it, under the name `arr`."""

    def encode(self, unischema_field: UnischemaField, value: Any) -> bytearray:
        target = io.BytesIO()
        np.savez_compressed(target, arr=fitting(unischema_field, value))
        return bytearray(target.getvalue())

    def decode(self, unischema_field: UnischemaField, value: bytes) -> Array:
        with np.load(io.BytesIO(value), allow_pickle=False) as archive:
            return np.asarray(archive["arr"])


class CompressedImageCodec(BytesCodec):
    """Images of uint8 or, gray and as png, uint16, of shape (height, width) or (height, width, 3), as png or jpeg.

    `quality` is that of jpeg, which changes values. Needs Pillow."""

    def __init__(self, image_codec: str = "png", quality: int = 80) -> None:
        if image_codec not in ("png", "jpg", "jpeg"):
            raise ValueError(f"image_codec must be png, jpg or jpeg, got {image_codec!r}")
        self._image_codec, self._quality = f".{image_codec}", quality  # Petastorm's names, which it pickles

    @property
    def image_codec(self) -> str:
        """The format of the images."""
        return self._image_codec[1:]

    def encode(self, unischema_field: UnischemaField, value: Any) -> bytearray:
        array = fitting(unischema_field, value)
        wide = array.dtype == np.uint16 and array.ndim == 2 and self.image_codec == "png"
        if not wide and (array.dtype != np.uint8 or (array.ndim != 2 and array.shape[2:] not in ((3,), (4,)))):
            problem = f"{self.image_codec} has no images of {array.dtype} and shape {array.shape}; take NdarrayCodec()"
            raise DataError(unischema_field.name, problem)
        with importing(__name__):
            from PIL import Image
        target = io.BytesIO()
        form = "PNG" if self.image_codec == "png" else "JPEG"
        Image.fromarray(array).save(target, form, **({} if form == "PNG" else {"quality": self._quality}))
        return bytearray(target.getvalue())

    def decode(self, unischema_field: UnischemaField, value: bytes) -> Array:
        with importing(__name__):
            from PIL import Image
        if value[:8] == _PNG and value[_PNG_BITS] == 16 and value[_PNG_COLORS] in (_RGB, _RGBA):
            # Pillow would keep the upper eight bits of each.
            raise DataError(unischema_field.name, "has colors of 16 bits, which Pillow cannot decode")
        try:
            with Image.open(io.BytesIO(value)) as opened:
                simple = {"P": "RGB", "1": "L"}.get(opened.mode)
                array = np.asarray(opened.convert(simple) if simple else opened)
        except Exception as error:  # decoders of damaged images raise errors of any class
            raise DataError(unischema_field.name, f"cannot be decoded: {error}") from error
        return array.astype(unischema_field.numpy_dtype)
