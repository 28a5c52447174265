"""Columns from the names of folders: year=2024/month=5/part-0.parquet.

Only folders below the `base` of a data set count. Those above it are where somebody keeps it: /home/user=joe/data."""

import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from urllib.parse import unquote

import pyarrow as pa

from farandole.data.places import has_signs
from farandole.errors import DataError

__all__ = ["add_partitions", "base_of", "partition_fields", "value_in_path"]

_NULL = "__HIVE_DEFAULT_PARTITION__"  # Hive's and Spark's name for no value


def base_of(places: Sequence[str], paths: Collection[str], *, local: bool) -> str:
    """Return the base of the files at `paths`, which lie at `places`: folders, globs and files.

    It is the given folder, that of a file, that before a glob's first sign; of several, the folder that they share."""
    tops = []
    for place in places:
        if place in paths:
            tops.append(posixpath.dirname(place))
        elif has_signs(place, local=local):
            tops.append(posixpath.dirname(re.split(r"[*?\[]", place)[0]))
        else:
            tops.append(place.rstrip("/"))
    first, last = min(split := [top.split("/") for top in tops]), max(split)  # what these two share, all do
    shared = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return "/".join(first[:shared])


def partition_fields(paths: Iterable[str], own: pa.Schema, base: str) -> list[pa.Field]:
    """Return the columns that these paths name and that the files do not have.

    A column is int64 if every value is an integer, and text otherwise, as Spark infers it. Raises `DataError` for one
    that only some of the paths name."""
    each_path = {path: _values(path, base) for path in paths}
    names = dict.fromkeys(name for each in each_path.values() for name in each if name not in own.names)
    fields = []
    for name in names:
        without = next((path for path, each in each_path.items() if name not in each), None)
        if without is not None:
            having = next(path for path, each in each_path.items() if name in each)
            raise DataError(name, f"is in the name of a folder of {having}, but of none of {without}")
        values = [each[name] for each in each_path.values() if each[name] is not None]
        numbers = all(re.fullmatch(r"-?\d{1,18}", value) for value in values if value is not None)
        fields.append(pa.field(name, pa.int64() if values and numbers else pa.string()))
    return fields


def add_partitions(table: pa.Table, path: str, fields: Iterable[pa.Field], base: str) -> pa.Table:
    """Return the table with these columns; each has one value, from `path`."""
    for field in fields:
        value = pa.scalar(value_in_path(path, field, base), field.type)
        table = table.append_column(field, pa.repeat(value, table.num_rows))
    return table


def value_in_path(path: str, field: pa.Field, base: str) -> int | str | None:
    """Return the value in `path` of a column that `partition_fields` has found."""
    value = _values(path, base)[field.name]
    return int(value) if value is not None and pa.types.is_integer(field.type) else value


def _values(path: str, base: str) -> Mapping[str, str | None]:
    inner = path.removeprefix(base)
    pairs = (part.split("=", 1) for part in inner.split("/")[:-1] if "=" in part)
    return {unquote(name): None if value == _NULL else unquote(value) for name, value in pairs}
