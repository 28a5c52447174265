"""Partition columns, which the names of folders define: year=2024/month=5/part-0.parquet.

Only folders below the `base` of a data set count. Folders above it, as in /home/user=joe/data, are not part of it."""

import os
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from urllib.parse import unquote

import pyarrow as pa

from farandole.data.formats.places import has_signs
from farandole.errors import DataError

_NULL = "__HIVE_DEFAULT_PARTITION__"  # Hive's and Spark's folder name for null


def base_of(places: Sequence[str], paths: Collection[str], *, local: bool) -> str:
    """Return the base folder of the files `paths`, which were found at `places`: folders, globs and files.

    The base of a folder is the folder itself, of a file its folder, and of a glob the folder before its first wildcard.
    The base of several places is the folder that their bases share."""
    tops = []
    for place in places:
        if place in paths:
            tops.append(posixpath.dirname(place))
        elif has_signs(place, local=local):
            tops.append(posixpath.dirname(re.split(r"[*?\[]", place)[0]))
        else:
            tops.append(place.rstrip("/"))
    return "/".join(os.path.commonprefix([top.split("/") for top in tops]))  # noqa: RUF071 - of lists


def partition_fields(
    paths: Iterable[str], own: Collection[str], base: str
) -> tuple[Sequence[pa.Field], Mapping[str, str], frozenset[str]]:
    """Return the columns that folders in `paths` define and that are not among the files' `own` columns.

    A column is int64 if all its values are integers, else text, as in Spark. The second result has the columns that
    only some of the paths define, each with an error text, the third the columns that folders and files define."""
    each_path = {path: _values(path, base) for path in paths}
    names = dict.fromkeys(name for each in each_path.values() for name in each)
    fields, problems = [], {}
    for name in names:
        if name in own:
            continue
        without = next((path for path, each in each_path.items() if name not in each), None)
        if without is not None:
            having = next(path for path, each in each_path.items() if name in each)
            problems[name] = f"is in the name of a folder of {having}, but of none of {without}"
        values = [each[name] for each in each_path.values() if each.get(name) is not None]
        numbers = all(re.fullmatch(r"-?\d{1,18}", value) for value in values if value is not None)
        fields.append(pa.field(name, pa.int64() if values and numbers else pa.string()))
    return fields, problems, frozenset(name for name in names if name in own)


def check_partitions(table: pa.Table, path: str, names: Iterable[str], base: str) -> None:
    """Raise `DataError` if one of these columns has a value that differs from that in the names of the file's folders.

    Spark would take the folder's value for all rows, and a reader of the file alone the file's."""
    values = _values(path, base)
    for name in names:
        if name not in values or name not in table.column_names:
            continue
        column = table[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        try:
            same = pa.scalar(values[name], pa.string()).cast(column.type)
        except pa.ArrowException:  # a folder's name that is no value of this type
            same = pa.scalar(values[name], pa.string())
        held = column[:1] if pa.types.is_nested(column.type) else column.unique()
        differing = next((each for each in held if each != same), None)
        if differing is not None:
            problem = f"is {differing.as_py()!r} in {path}, but {values[name]!r} in the name of a folder"
            raise DataError(name, f"{problem}; rename one of the two, or leave the column out")


def add_partitions(table: pa.Table, path: str, fields: Iterable[pa.Field], base: str) -> pa.Table:
    """Return the table with these columns appended; each has the one value that `path` defines."""
    for field in fields:
        value = pa.scalar(value_in_path(path, field, base), field.type)
        table = table.append_column(field, pa.repeat(value, table.num_rows))
    return table


def value_in_path(path: str, field: pa.Field, base: str) -> int | str | None:
    """Return the value that `path` defines for a column of `partition_fields`; None for null."""
    value = _values(path, base)[field.name]
    return int(value) if value is not None and pa.types.is_integer(field.type) else value


def _values(path: str, base: str) -> Mapping[str, str | None]:
    inner = path.removeprefix(base)
    pairs = (part.split("=", 1) for part in inner.split("/")[:-1] if "=" in part)
    return {unquote(name): None if value == _NULL else unquote(value) for name, value in pairs}
