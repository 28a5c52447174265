"""Columns from the names of folders: year=2024/month=5/part-0.parquet."""

import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

import pyarrow as pa

__all__ = ["add_partitions", "partition_fields", "value_in_path"]

_NULL = "__HIVE_DEFAULT_PARTITION__"  # Hive's and Spark's name for no value


def partition_fields(paths: Iterable[str], own: pa.Schema) -> list[pa.Field]:
    """Return the columns that all of these paths name and that the files do not have.

    A column is int64 if every value is an integer, and text otherwise, as Spark infers it."""
    each_path = [_values(path) for path in paths]
    first = each_path[0] if each_path else {}
    names = [name for name in first if all(name in each for each in each_path) and name not in own.names]
    fields = []
    for name in names:
        values = [each[name] for each in each_path if each[name] is not None]
        numbers = all(re.fullmatch(r"-?\d{1,18}", value) for value in values if value is not None)
        fields.append(pa.field(name, pa.int64() if values and numbers else pa.string()))
    return fields


def add_partitions(table: pa.Table, path: str, fields: Iterable[pa.Field]) -> pa.Table:
    """Return the table with these columns; each has one value, from `path`."""
    for field in fields:
        value = pa.scalar(value_in_path(path, field), field.type)
        table = table.append_column(field, pa.repeat(value, table.num_rows))
    return table


def value_in_path(path: str, field: pa.Field) -> int | str | None:
    """Return the value in `path` of a column that `partition_fields` has found."""
    value = _values(path)[field.name]
    return int(value) if value is not None and pa.types.is_integer(field.type) else value


def _values(path: str) -> Mapping[str, str | None]:
    pairs = (part.split("=", 1) for part in path.split("/")[:-1] if "=" in part)
    return {unquote(name): None if value == _NULL else unquote(value) for name, value in pairs}
