"""Petastorm's Unischema: the fields of a data set, with their types in NumPy and their codecs."""

import re
from collections import OrderedDict, namedtuple
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.data.unischema.field import UnischemaField, fitting, plain
from farandole.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import Row
    from pyspark.sql.types import DataType, StructType

__all__ = ["Unischema", "UnischemaField", "dict_to_spark_row", "insert_explicit_nulls", "match_unischema_fields"]

_SPARK_TYPES = {
    "bool": "BooleanType",
    "int8": "ByteType",
    "uint8": "ShortType",
    "int16": "ShortType",
    "uint16": "IntegerType",
    "int32": "IntegerType",
    "uint32": "LongType",
    "int64": "LongType",
    "float32": "FloatType",
    "float64": "DoubleType",
    "str": "StringType",
    "bytes": "BinaryType",
}


class Unischema:
    """Fields by name, in the order given; each is an attribute, too, unless its name is that of a method."""

    def __init__(self, name: str, fields: Iterable[UnischemaField]) -> None:
        self._name = name
        # Petastorm's names, which it pickles.
        self._fields = OrderedDict((field.name, field) for field in fields)
        for field in self._fields.values():
            if not hasattr(type(self), field.name):
                setattr(self, field.name, field)

    def __getattr__(self, name: str) -> UnischemaField:
        raise AttributeError(f"Unischema {self.__dict__.get('_name')} has no field {name}")

    def __repr__(self) -> str:
        return f"Unischema({self._name}, {[*self._fields.values()]})"

    @property
    def fields(self) -> OrderedDict[str, UnischemaField]:
        """The fields by name."""
        return self._fields

    def create_schema_view(self, fields: Iterable[str | UnischemaField]) -> "Unischema":
        """Return a schema of some fields: fields, or regular expressions of their names."""
        asked = [*fields]
        chosen = match_unischema_fields(self, [each for each in asked if isinstance(each, str)])
        for field in asked:
            if isinstance(field, UnischemaField):
                if self._fields.get(field.name) != field:
                    raise ValueError(f"field {field.name} is not one of {self._name}")
                chosen.append(field)
        return Unischema(f"{self._name}_view", dict.fromkeys(chosen))

    def as_spark_schema(self) -> "StructType":
        """Return Spark's schema of the stored rows."""
        from pyspark.sql.types import StructField, StructType

        return StructType([StructField(each.name, _spark_type(each), bool(each.nullable)) for each in self])

    def make_namedtuple(self, **values: object) -> Any:
        """Return a named tuple of the fields with these values."""
        return namedtuple(self._name, self._fields)(**values)

    def __iter__(self) -> Iterator[UnischemaField]:
        return iter(self._fields.values())


def match_unischema_fields(schema: Unischema, field_regex: Iterable[str]) -> list[UnischemaField]:
    """Return the fields whose whole names match any of the regular expressions."""
    patterns = [*field_regex]
    return [field for field in schema if any(re.fullmatch(pattern, field.name) for pattern in patterns)]


def insert_explicit_nulls(unischema: Unischema, row_dict: dict[str, Any]) -> None:
    """Set fields that a row lacks to None in it; raises `DataError` for one that cannot be null."""
    for field in unischema:
        if field.name not in row_dict:
            if not field.nullable:
                raise DataError(field.name, "is missing in the row, and is not nullable in the schema")
            row_dict[field.name] = None


def dict_to_spark_row(unischema: Unischema, row_dict: Mapping[str, Any]) -> "Row":
    """Return the row that Spark stores for the values in `row_dict`, which the codecs encode.

    Raises `DataError` for names that the schema lacks, missing values, and values that do not fit their fields."""
    from pyspark.sql import Row

    row = dict(row_dict)
    if unknown := sorted(row.keys() - unischema.fields.keys()):
        raise DataError(unknown[0], f"is not in the schema, which has {', '.join(unischema.fields)}")
    insert_explicit_nulls(unischema, row)
    return Row(**{field.name: _stored(field, row[field.name]) for field in unischema})


def _stored(field: UnischemaField, value: Any) -> object:
    if value is None:
        if not field.nullable:
            raise DataError(field.name, "is None, and is not nullable in the schema")
        return None
    if field.codec is not None:
        return field.codec.encode(field, value)
    return fitting(field, value).tolist() if field.shape else plain(field, value)


def _spark_type(field: UnischemaField) -> "DataType":
    from pyspark.sql import types

    if field.codec is not None:
        return field.codec.spark_dtype()
    if field.numpy_dtype is Decimal:
        return types.DecimalType(38, 18)
    dtype = np.dtype(field.numpy_dtype)
    named = "TimestampType" if dtype.kind == "M" else _SPARK_TYPES.get(dtype.type.__name__.rstrip("_"))
    if named is None:
        raise DataError(field.name, f"Spark has no type for {dtype}; give the field a codec")
    kind: DataType = getattr(types, named)()
    for _ in field.shape:
        kind = types.ArrayType(kind, containsNull=False)
    return kind
