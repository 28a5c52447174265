"""A field of a Unischema, and what a codec does for it."""

from abc import ABC, abstractmethod
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from farandole.data.loading.values import Array
from farandole.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType


class DataframeColumnCodec(ABC):
    """Base of codecs."""

    @abstractmethod
    def encode(self, unischema_field: "UnischemaField", value: Any) -> Any:
        """Return what is stored for a value; raises `DataError` for one that does not fit the field."""

    @abstractmethod
    def decode(self, unischema_field: "UnischemaField", value: Any) -> Any:
        """Return the value of what is stored."""

    @abstractmethod
    def spark_dtype(self) -> "DataType":
        """Return Spark's type of the stored column."""


class UnischemaField(NamedTuple):
    """One field. `shape` is () for a scalar, and has None for lengths that vary. Without a codec Spark stores it."""

    name: str
    numpy_dtype: Any
    shape: tuple[int | None, ...]
    codec: DataframeColumnCodec | None = None
    nullable: bool | None = False


def fitting(field: UnischemaField, value: Any) -> Array:
    """Return an array of the field's type and shape; raises `DataError` for another one."""
    if not isinstance(value, np.ndarray):
        raise DataError(field.name, f"is an array in the schema, got {type(value).__name__}")
    if value.dtype != np.dtype(field.numpy_dtype):
        raise DataError(field.name, f"is {np.dtype(field.numpy_dtype)} in the schema, got {value.dtype}")
    fits = len(value.shape) == len(field.shape) and all(
        wanted in (None, length) for wanted, length in zip(field.shape, value.shape, strict=True)
    )
    if not fits:
        raise DataError(field.name, f"has shape {field.shape} in the schema, got {value.shape}")
    return value


def plain(field: UnischemaField, value: Any) -> object:
    """Return a scalar as the Python object that Spark takes; raises `DataError` for arrays."""
    if isinstance(value, np.datetime64):
        return value.astype("datetime64[us]").item()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray | list | tuple | dict):
        raise DataError(field.name, f"is one value in the schema, got {type(value).__name__}")
    kind = field.numpy_dtype
    if kind is Decimal:
        return value if isinstance(value, Decimal) else Decimal(str(value))
    code = np.dtype(kind).kind
    wanted = {"b": bool, "i": int, "u": int, "f": float, "U": str, "S": bytes}.get(code)
    if wanted is None or isinstance(value, wanted):
        return value
    if code == "f" and isinstance(value, int):
        return float(value)
    raise DataError(field.name, f"is {np.dtype(kind).name} in the schema, got {value!r}")
