"""Choice of the DataFrame's columns for the ranks, and their types, from the schema alone, before any job."""

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from farandole.errors import ConfigError, DataError
from farandole.estimators.trainers.rows import HASH, VALIDATES, fed_as
from farandole.spark.jobs.application import require_running

_INTEGERS = (ByteType, ShortType, IntegerType, LongType)
_NUMBERS = (*_INTEGERS, FloatType, DoubleType, BooleanType)
_NO_ITEM = 1.7976931348623e-310  # a number that no array of numbers holds
_TEXTS = (StringType, BinaryType)
HELD = "numbers, booleans, arrays of these and pyspark.ml vectors are held"
_REMEDIES = {
    StringType: "index it by pyspark.ml's StringIndexer, or by xxhash64",
    BinaryType: "decode it into an array of numbers",
    DecimalType: "cast it to double",
    DateType: "use datediff or unix_date",
    TimestampType: "cast it to double, seconds since 1970",
    StructType: "select its fields as columns",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """The columns that ranks get; made by `plan_feed`."""

    columns: tuple[str, ...]
    schema: StructType
    validation_col: str | None
    as_they_are: frozenset[str] = frozenset()  # columns that are fed in their own types

    def frame(self, rows: DataFrame, num_proc: int) -> DataFrame:
        """Return the rows as the ranks get them, in `num_proc` partitions.

        Each row carries a hash of its content. The hash alone decides the row's partition and its place in a rank's
        order, so that neither depends on Spark's partitions and their order. Partitions have about equally many rows;
        ranks balance the rest. Raises `ConfigError` if the session of `rows` has been stopped."""
        require_running(rows.sparkSession)
        columns = [self._fed(name).alias(fed_as(place)) for place, name in enumerate(self.columns)]
        # Hash numbers where possible: so compressed vectors have the hash, and thus the order, of dense ones.
        extra = [F.xxhash64(*[_hashable(self.schema, name) for name in self.columns]).alias(HASH)]
        if self.validation_col is not None:
            extra.append((as_numbers(self.schema, self.validation_col) != 0).cast("tinyint").alias(VALIDATES))
        return rows.select(*columns, *extra).repartition(num_proc, HASH)

    def _fed(self, name: str) -> Column:
        return quoted(name) if name in self.as_they_are else as_numbers(self.schema, name)


def plan_feed(
    schema: StructType,
    *,
    features: Sequence[str],
    labels: Sequence[str],
    weight: str | None = None,
    validation: str | None,
    compressed: bool = False,
    texts: bool = False,
) -> Feed:
    """Choose the columns; `weight` names that of the rows' weights, `validation` the one whose true rows validate.

    With `compressed` vectors stay as they are; with `texts` strings and bytes are held, too. Raises `ConfigError`
    without features or labels, `DataError` naming a column that is not there or whose type no tensor holds.
    """
    for setting, names in (("feature_cols", features), ("label_cols", labels)):
        if not names:
            raise ConfigError(setting, "name at least one column")
    columns = tuple(dict.fromkeys([*features, *labels, *([] if weight is None else [weight])]))
    check_columns(schema, columns, texts=texts)
    if weight is not None and not isinstance(_type_of(schema, weight), _NUMBERS):
        raise DataError(
            weight, f"is {_type_of(schema, weight).simpleString()}; sample_weight_col holds one number per row"
        )
    _check_validation(schema, validation, columns)
    vectors = frozenset(name for name in columns if compressed and isinstance(_type_of(schema, name), VectorUDT))
    return Feed(columns=columns, schema=schema, validation_col=validation, as_they_are=vectors)


def plan_transformed_feed(
    schema: StructType,
    *,
    wanted: Sequence[str],
    edited: Collection[str],
    removed: Sequence[str],
    validation: str | None,
    compressed: bool = False,
) -> Feed:
    """Choose the columns, in their own types, for a user's function of rows, which makes the `wanted` ones.

    The function takes those of the `wanted` and `removed` columns that the DataFrame has. With `compressed` vectors
    stay as they are, otherwise they become arrays. Raises `DataError` for a column that is neither in the DataFrame nor
    `edited`, `ConfigError` if no column is left."""
    for name in (*wanted, *removed):
        if name in removed or name not in edited:
            _type_of(schema, name)
    columns = tuple(name for name in dict.fromkeys([*wanted, *removed]) if name in schema.names)
    if not columns:
        raise ConfigError(
            "transformation_removed_fields",
            f"name the columns that transformation_fn takes: the DataFrame has none of {', '.join(wanted)}",
        )
    _check_validation(schema, validation, columns)
    vectors = {name for name in columns if isinstance(_type_of(schema, name), VectorUDT) and not compressed}
    return Feed(
        columns=columns, schema=schema, validation_col=validation, as_they_are=frozenset(columns) - frozenset(vectors)
    )


def _check_validation(schema: StructType, validation: str | None, columns: Sequence[str]) -> None:
    if validation is None:
        return
    kind = _type_of(schema, validation)
    if not isinstance(kind, (BooleanType, *_INTEGERS)):
        raise DataError(validation, f"is {kind.simpleString()}; a validation column holds booleans or integers")
    if validation in columns:
        raise DataError(validation, "is the validation column, and a feature or label as well")


def check_columns(schema: StructType, names: Sequence[str], *, texts: bool = False) -> None:
    """Raise `DataError` for a column that is not there or whose type no tensor holds; with `texts` strings are held."""
    for name in names:
        kind = _type_of(schema, name)
        numbers = kind.elementType if isinstance(kind, ArrayType) else kind
        if isinstance(numbers, _NUMBERS) or isinstance(kind, VectorUDT) or (texts and isinstance(kind, _TEXTS)):
            continue
        held = f"{HELD}, strings and bytes too" if texts else HELD
        remedy = next((f"; {text}" for each, text in _REMEDIES.items() if isinstance(kind, each)), "")
        raise DataError(name, f"no tensor holds {kind.simpleString()}; {held}{remedy}")


def is_text(schema: StructType, name: str) -> bool:
    """Return whether the column holds strings or bytes."""
    return isinstance(_type_of(schema, name), _TEXTS)


def as_numbers(schema: StructType, name: str) -> Column:
    """Return the column as numbers or arrays of numbers: vectors become arrays of double, booleans 0 and 1."""
    kind = _type_of(schema, name)
    if isinstance(kind, VectorUDT):
        return F.when(quoted(name).isNotNull(), vector_to_array(quoted(name)))  # which fails on nulls
    if isinstance(kind, BooleanType):
        return quoted(name).cast("tinyint")
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, BooleanType):
        return quoted(name).cast("array<tinyint>")
    return quoted(name)


def numbers_without_nulls(schema: StructType, name: str) -> Column:
    """Return the column as numbers or arrays of numbers; a null in it ends Spark's job with an error that names it.

    In pandas, to which Spark converts the column for Python, a null could not be told from NaN."""
    kind, column = _type_of(schema, name), as_numbers(schema, name)
    null = column.isNull()
    if isinstance(kind, ArrayType) and kind.containsNull:
        # Null, not false, if an item is null, as none is equal to this number. `exists` would take far longer.
        null = null | F.array_contains(column.cast("array<double>"), _NO_ITEM).isNull()
    problem = F.raise_error(
        F.lit(f"column '{name}': a row is null or holds a null; fill them or drop these rows first")
    )
    return F.when(null, problem).otherwise(column)


def _hashable(schema: StructType, name: str) -> Column:
    """Return the column in a form that Spark can hash: as JSON text if it holds maps."""
    return F.to_json(F.struct(quoted(name))) if _holds_maps(_type_of(schema, name)) else as_numbers(schema, name)


def _holds_maps(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        return _holds_maps(kind.elementType)
    if isinstance(kind, StructType):
        return any(_holds_maps(field.dataType) for field in kind.fields)
    return isinstance(kind, MapType)


def _type_of(schema: StructType, name: str) -> DataType:
    for field in schema.fields:
        if field.name == name:
            return field.dataType
    near = difflib.get_close_matches(name, schema.fieldNames(), 1, 0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise DataError(name, f"is not in the DataFrame, which has {', '.join(schema.fieldNames())}{hint}")


def quoted(name: str) -> Column:
    """Return the column of this name. Without quotes Spark reads a dot as the field of a struct."""
    return F.col("`" + name.replace("`", "``") + "`")
